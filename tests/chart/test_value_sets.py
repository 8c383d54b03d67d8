"""What platform teams set: rendered as meant, or refused with the key to use instead."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_rendering import NOTES, OWN_IMAGES, Document, documents, helm, needs_helm, pod_templates
from cluster_names import is_dns_label
from generate import CHART

from taut_service.config.settings import load_settings

pytestmark = needs_helm
WRITTEN: Document = yaml.safe_load(Path(__file__).with_name("value_sets.yaml").read_text())
SETS: dict[str, Document] = WRITTEN["sets"]
RENDERED = {name: each for name, each in SETS.items() if "refused" not in each}
REFUSED = {name: each for name, each in SETS.items() if "refused" in each}
NAMES = re.compile(r"(?P<kind>\w+)/(?P<end>[\w.-]+)")


@functools.cache
def rendering(name: str) -> Any:
    """Render a set as Helm would: its values over those that all have."""
    each = SETS[name]
    with tempfile.TemporaryDirectory() as folder:
        base, own = Path(folder) / "base.yaml", Path(folder) / "own.yaml"
        base.write_text(yaml.safe_dump(WRITTEN["base"]))
        own.write_text(yaml.safe_dump(each.get("values", {})))
        where = ["--namespace", each.get("namespace", "ns"), *each.get("options", [])]
        values = [f"--values={path}" for path in (OWN_IMAGES, base, own)]
        return helm("template", each.get("release", "rel"), str(CHART), *where, *values)


def objects(name: str) -> list[Document]:
    done = rendering(name)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def named(rendered: list[Document], name: str) -> list[Document]:
    match = NAMES.fullmatch(name)
    assert match, name
    return [
        document
        for document in rendered
        if document["kind"] == match["kind"] and document["metadata"]["name"].endswith(match["end"])
    ]


def place(document: Document, path: str) -> Any:
    found: Any = document
    for key in path.split(":"):
        if isinstance(found, list):
            found = found[int(key)] if int(key) < len(found) else None
        elif isinstance(found, dict):
            found = found.get(key)
    return found


@pytest.mark.parametrize("name", RENDERED)
def test_set_is_rendered_as_meant(name: str):
    each = RENDERED[name]
    rendered = objects(name)
    assert set(each) & {"is", "without", "everywhere", "namespace_of_all"}, "nothing is asked"
    for where, wanted in each.get("is", {}).items():
        found = named(rendered, where.partition(" ")[0])
        assert len(found) == 1, (where, [document["metadata"]["name"] for document in found])
        assert place(found[0], where.partition(" ")[2]) == wanted, where
    for gone in each.get("without", []):
        assert not named(rendered, gone), gone
    for document in rendered:
        labels = document["metadata"].get("labels", {})
        assert each.get("everywhere", {}).items() <= labels.items(), document["metadata"]["name"]
        assert document["metadata"].get("namespace") == each.get("namespace_of_all")
    for where, pod in pod_templates(rendered):
        assert each.get("everywhere", {}).items() <= pod["metadata"]["labels"].items(), where


@pytest.mark.parametrize("name", RENDERED)
def test_set_is_valid(name: str):
    package = pytest.importorskip("kubernetes_validate", reason="NO kubernetes-validate HERE")
    rendered = objects(name)
    keys = [(document["kind"], document["metadata"]["name"]) for document in rendered]
    assert len(keys) == len(set(keys))
    for document in rendered:
        if "." not in document["apiVersion"].partition("/")[0].removesuffix(".k8s.io"):
            package.utils.validate(document, "1.37", strict=True)
        elif document["kind"] == "InferencePool":
            NOTES.add("NOT VALIDATED by its definition, which no package brings: InferencePool")
        if document["kind"] == "Service":
            assert is_dns_label(document["metadata"]["name"])


@pytest.mark.parametrize("name", RENDERED)
def test_gateway_takes_the_file_of_a_set(name: str, tmp_path: Path):
    (found,) = (one for one in named(objects(name), "ConfigMap/-gateway") if one.get("data"))
    path = tmp_path / "gateway.yaml"
    path.write_text(found["data"]["gateway.yaml"])
    assert load_settings(path).models


@pytest.mark.parametrize("name", REFUSED)
def test_set_is_refused_with_the_key_to_use(name: str):
    assert REFUSED[name]["refused"]
    done = rendering(name)
    assert done.returncode != 0 and done.stdout == "", "accepted"
    assert REFUSED[name]["refused"] in done.stderr, done.stderr
