"""Every CI value set is valid for every supported Kubernetes, and so are the custom kinds."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
from chart_rendering import CI_SETS, NOTES, Document, helm, needs_helm, render, render_set
from generate import CHART
from jsonschema import Draft202012Validator

pytestmark = needs_helm
FIRST_MINOR, LAST_MINOR = 29, 37
WANTED = [f"1.{minor}" for minor in range(FIRST_MINOR, LAST_MINOR + 1)]
CUSTOM_KINDS = {
    "ScaledObject": "cloudcoil.models.keda.v1alpha1",
    "ServiceMonitor": "cloudcoil.models.prometheus_operator.v1",
    "PrometheusRule": "cloudcoil.models.prometheus_operator.v1",
}
"""Kinds whose CustomResourceDefinitions are on PyPI, as models."""
WITHOUT_SCHEMA = {"LeaderWorkerSet", "HTTPRoute"}
"""Kinds whose definitions no Python package brings."""


@functools.cache
def schema_reader(contents: Any) -> Any:
    """The files are large and read again for every document otherwise."""
    return functools.cache(contents)


@functools.cache
def custom_schema(kind: str) -> Draft202012Validator:
    """A validator from the package's model that also refuses unknown keys."""
    model = getattr(importlib.import_module(CUSTOM_KINDS[kind]), kind)
    schema = model.model_json_schema()
    for part in (schema, *schema.get("$defs", {}).values()):
        if "properties" in part:
            part.setdefault("additionalProperties", False)
    return Draft202012Validator(schema)


def built_in(rendered: list[Document]) -> list[Document]:
    return [
        document
        for document in rendered
        if document["kind"] not in CUSTOM_KINDS and document["kind"] not in WITHOUT_SCHEMA
    ]


def test_lint_is_clean():
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout and "[ERROR]" not in done.stdout


@pytest.mark.parametrize("version", WANTED)
def test_every_set_is_valid_for(version: str, monkeypatch: pytest.MonkeyPatch):
    package = pytest.importorskip("kubernetes_validate", reason="NO kubernetes-validate HERE")
    there = {".".join(have.split(".")[:2]) for have in package.utils.all_versions()}
    if version not in there:
        NOTES.add(f"NOT VALIDATED: Kubernetes {version}, no schemas in this kubernetes-validate")
        pytest.skip(f"NO schemas for Kubernetes {version} in this kubernetes-validate")
    cached = schema_reader(package.utils.schema_contents)
    monkeypatch.setattr(package.utils, "schema_contents", cached)
    for name in CI_SETS:
        for document in built_in(render_set(name)):
            assert package.utils.validate(document, version, strict=True) == version, document
    NOTES.add(f"validated strictly against the schemas of Kubernetes {version}")


def test_a_wrong_document_is_found():
    package = pytest.importorskip("kubernetes_validate", reason="NO kubernetes-validate HERE")
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}}
    with pytest.raises(package.utils.ValidationError):
        package.utils.validate({**service, "spec": {"prots": []}}, WANTED[-1], strict=True)


@pytest.mark.parametrize("kind", CUSTOM_KINDS)
def test_custom_kinds_are_valid(kind: str):
    pytest.importorskip("cloudcoil", reason="NO cloudcoil HERE: custom kinds are NOT validated")
    found = [doc for name in CI_SETS for doc in render_set(name) if doc["kind"] == kind]
    assert found, f"no CI value set renders a {kind}"
    for document in found:
        custom_schema(kind).validate(document)
    wrong = {**found[0], "spec": {**found[0]["spec"], "unknown": 1}}
    assert not custom_schema(kind).is_valid(wrong)
    NOTES.add(f"validated against the definition in {CUSTOM_KINDS[kind]}: {kind}")


def test_kinds_without_a_schema_are_named():
    kinds = {document["kind"] for name in CI_SETS for document in render_set(name)}
    for kind in sorted(kinds & WITHOUT_SCHEMA):
        NOTES.add(f"NOT VALIDATED: {kind}, no package brings its definition")
    assert kinds >= WITHOUT_SCHEMA, "a kind without a schema is in no CI value set"


@pytest.mark.parametrize("name", [*CI_SETS, None])
def test_objects_have_different_names_and_a_namespace_is_left_to_helm(name: str | None):
    rendered = render_set(name) if name else render()
    names = [(doc["kind"], doc["metadata"]["name"]) for doc in rendered]
    assert len(names) == len(set(names))
    assert all("namespace" not in document["metadata"] for document in rendered)
    assert all(len(each) <= 63 for _, each in names)


def test_the_longest_names_still_fit():
    longest = {
        "fullnameOverride": "a" * 30,
        "variants": [{"name": "b" * 24, "checkpoint": "checkpoints/b"}],
    }
    services = [doc["metadata"]["name"] for doc in render(longest) if doc["kind"] == "Service"]
    assert max(map(len, services)) == 62
