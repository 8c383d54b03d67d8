"""Generated files are current, and the values are described and accepted one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import generate
import pytest
import yaml
from chart_rendering import DEFAULTS, needs_helm


@pytest.mark.parametrize("path", generate.expected(), ids=lambda path: path.name)
def test_file_is_current(path: Path):
    assert path.read_text() == generate.expected()[path], "run: python k8s/generate.py"


def test_no_copy_is_left_over():
    assert generate.strangers() == []


@needs_helm
@pytest.mark.parametrize("name", generate.MANIFESTS)
def test_manifest_is_current(name: str):
    path = generate.HERE / "manifests" / generate.MANIFESTS[name]
    assert path.read_text() == generate.manifest(name), "run: python k8s/generate.py"


def leaves(value: Any, path: str = "") -> list[str]:
    if not isinstance(value, dict) or not value:
        return [path]
    return [
        leaf for key, below in value.items() for leaf in leaves(below, f"{path}.{key}".strip("."))
    ]


SHOWN_WHOLE = ("podSecurityContext", "containerSecurityContext", "initResources")
"""Kubernetes' own objects, which have one row each."""
FREE = ("variants", "monitoring.dashboard.labels", "networkPolicy.monitoringFrom")


def test_every_default_has_a_row_in_the_table():
    table = generate.values_table()
    for leaf in leaves(DEFAULTS):
        if not leaf.startswith(FREE) and ".resources." not in leaf:
            described = f"| `{leaf}` |" in table
            assert described or leaf.split(".")[0] in SHOWN_WHOLE, leaf


def test_every_key_is_described():
    root = yaml.safe_load((generate.HERE / "values.schema.yaml").read_text())

    def undescribed(part: dict[str, Any], path: str) -> list[str]:
        missing = []
        for key, below in part.get("properties", {}).items():
            name = f"{path}.{key}"
            reference = str(below.get("$ref", ""))
            target = root["definitions"].get(reference.rpartition("/")[2], below)
            nested = target.get("properties") or below.get("items", {}).get("properties")
            if nested and "resources" not in reference and "description" not in below:
                missing += undescribed({"properties": nested}, name)
            elif "description" not in below:
                missing.append(name)
            if below.get("items", {}).get("properties") and key == "variants":
                missing += undescribed(below["items"], f"{name}[]")
        return missing

    assert undescribed(root, "") == []


def test_every_object_of_the_schema_is_closed():
    def opened(part: Any, path: str) -> list[str]:
        found = []
        if isinstance(part, dict):
            if "properties" in part and part.get("type") == "object":
                found += [path] if part.get("additionalProperties") is not False else []
            for key, below in part.items():
                found += opened(below, f"{path}/{key}")
        elif isinstance(part, list):
            for position, below in enumerate(part):
                found += opened(below, f"{path}/{position}")
        return found

    # A chart that has this one as a dependency puts into it what it likes.
    assert opened(generate.schema(), "") == ["/properties/global"]
