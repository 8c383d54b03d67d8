"""The values that k8s/README.md shows are taken by the chart, each by itself."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from chart_rendering import Document, documents, needs_helm, template
from generate import HERE

pytestmark = needs_helm
README = (HERE / "README.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", README, re.S)
SHOWN = [entry for block in BLOCKS for entry in re.split(r"(?m)^(?=\w)", block) if entry]


def beside(values: Document) -> Document:
    """What an entry needs that the text around it says."""
    text = str(values)
    needed: dict[str, Any] = {}
    if "multiNode" in text:
        needed["modelStore"] = {"accessMode": "ReadWriteMany"}
    if "ReadOnlyMany" in text:
        needed["prepare"] = {"enabled": False}
    if "urls" in text:
        needed["networkPolicy"] = {"gatewayEgress": [{}]}
    if "ReadOnlyMany" in text or "revision" in text:
        needed["variants"] = [{"name": "x", "checkpoint": "checkpoints/x"}]
    return needed


def test_there_are_examples():
    assert len(SHOWN) > 12


@pytest.mark.parametrize("entry", SHOWN, ids=lambda entry: entry[:40].strip())
def test_example_is_rendered(entry: str):
    values = yaml.safe_load(entry)
    done = template({**beside(values), **values})
    assert done.returncode == 0, done.stderr
    assert documents(done.stdout) != documents(template({}).stdout), "changes nothing"
