"""Every key of the values changes what is rendered, and never to what the gateway refuses."""

from __future__ import annotations

import functools
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_rendering import Document, needs_helm, set_values, template
from generate import described, pod_keys

from taut_service.config.settings import load_settings

pytestmark = needs_helm
WRITTEN: Document = yaml.safe_load(Path(__file__).with_name("every_key.yaml").read_text())
OTHER: Document = WRITTEN["other"]
"""A value of each key for which the schema's type alone gives none; longer paths come first."""
BASES: dict[str, Document] = WRITTEN["bases"] | {
    name: set_values(name) for name in ("canary", "one-gpu", "multi-node", "rollout")
}
PODS = ("gateway", "worker", "prepare", "validation", "smokeTest", "variants.0")
GATEWAYS_FILE = re.compile(r"^  gateway\.yaml: \|\n((?:    .*\n)+)", re.MULTILINE)


def leaves(root: Document, part: Document, path: str = "") -> Iterator[tuple[str, Document]]:
    """Paths of all keys that hold a value, with their schemas; a pod's have a test of their own."""
    name = part.get("$ref", "").rpartition("/")[2]
    part = root["definitions"].get(name, {}) | part
    if "properties" in part and name != "resources":
        for key, below in part["properties"].items():
            if path not in PODS or key not in pod_keys():
                yield from leaves(root, below, f"{path}.{key}".strip("."))
    elif "properties" in part.get("items", {}) and name != "tolerations":
        yield from leaves(root, part["items"], f"{path}.0")
    else:
        yield path, part


SCHEMA = described()
LEAVES = dict(leaves(SCHEMA, SCHEMA))


def values_of(path: str) -> list[Any]:
    """Legal values of a key, at least one of them not its default."""
    names = path.split(".")
    for start in range(len(names)):
        if (name := ".".join(names[start:])) in OTHER:
            return [OTHER[name]]
    schema = LEAVES[path]
    if "enum" in schema:
        return list(schema["enum"])
    if schema["type"] == "boolean":
        return [True, False]
    if schema["type"] in ("integer", "number"):
        least = max(schema.get("minimum", 0), 1)
        return [min(least + more, schema.get("maximum", least + more)) for more in (2, 6)]
    assert schema["type"] == "string", f"every_key.yaml: no value for {path}"
    return ["own"]


def with_key(base: Document, path: str, value: Any) -> Document:
    """A copy of the values with one key set, in every entry of a list."""
    if not path:
        return value
    key, _, rest = path.partition(".")
    if key == "0":
        return [with_key(entry, rest, value) for entry in base or [{}]]  # type: ignore[return-value]
    return {**(base or {}), key: with_key((base or {}).get(key), rest, value)}


@functools.cache
def rendered(values: str) -> str:
    """What the chart makes of the values."""
    return template(json.loads(values)).stdout


def changes(path: str, folder: Path) -> bool:
    """Whether a value of a key makes a difference to one of the bases."""
    for base in BASES.values():
        before = rendered(json.dumps(base))
        for value in values_of(path):
            after = template(with_key(base, path, value)).stdout
            if after and after != before:
                if (file := gateways_file(after)) != gateways_file(before):
                    (folder / "gateway.yaml").write_text(file)
                    load_settings(folder / "gateway.yaml")
                return True
    return False


def gateways_file(text: str) -> str:
    """The gateway's file out of the rendered text, which is not parsed: that takes longer."""
    (found,) = GATEWAYS_FILE.findall(text)
    return textwrap.dedent(found)


@pytest.mark.parametrize("base", BASES)
def test_base_is_rendered(base: str):
    done = template(BASES[base])
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("section", SCHEMA["properties"])
def test_no_key_is_without_effect(section: str, tmp_path: Path):
    mine = [path for path in LEAVES.keys() - WRITTEN["together"] if path.split(".")[0] == section]
    assert mine
    assert [path for path in mine if not changes(path, tmp_path)] == []
