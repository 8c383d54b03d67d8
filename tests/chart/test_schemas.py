"""Every CI value set is valid for every supported Kubernetes, and so are the custom kinds."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from chart_rendering import (
    CI_SETS,
    NOTES,
    Document,
    changed,
    helm,
    needs_helm,
    of_kind,
    render,
    render_set,
)
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
HTTP_ROUTE = Path(sys.prefix) / "share" / "chart-definitions" / "HTTPRoute.json"
"""Out of an npm package, by requirements/tools.py."""
OWN_TESTS = {"LeaderWorkerSet", "HTTPRoute"}
"""Custom kinds that have a test of their own."""


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
        if document["kind"] not in CUSTOM_KINDS and document["kind"] not in OWN_TESTS
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


def closed(part: Any) -> Any:
    """A definition that also refuses unknown keys, as an API server warns of them."""
    if isinstance(part, list):
        return [closed(each) for each in part]
    if not isinstance(part, dict):
        return part
    result = {key: closed(below) for key, below in part.items()}
    if isinstance(part.get("properties"), dict):
        result.setdefault("additionalProperties", False)
    return result


@pytest.mark.skipif(not HTTP_ROUTE.exists(), reason="NO definition HERE: HTTPRoute NOT validated")
@pytest.mark.parametrize(
    ("path", "value", "is_valid"),
    [
        ("spec.hostnames", ["llm.example.com"], True),
        ("spec.unknown", 1, False),
        ("spec.rules.0.timeouts.request", "half an hour", False),
        ("spec.rules.0.timeouts.requests", "1s", False),
        ("spec.rules.0.backendRefs.0.port", 0, False),
        ("spec.rules.0.matches.0.path.type", "Prefix", False),
        ("spec.parentRefs.0.name", "", False),
    ],
)
def test_http_route_is_valid(path: str, value: object, is_valid: bool):
    known = json.loads(HTTP_ROUTE.read_text())
    definition = {**known["schema"], "properties": dict(known["schema"]["properties"])}
    # Kubernetes' own part, which the other kinds are validated with.
    del definition["properties"]["metadata"]
    validator = Draft202012Validator(closed(definition["properties"]["spec"]))
    (route,) = of_kind(render_set("canary"), "HTTPRoute")
    assert route["apiVersion"] in definition["properties"]["apiVersion"]["enum"]
    validator.validate(route["spec"])
    assert validator.is_valid(changed(route, path, value)["spec"]) is is_valid
    NOTES.add(f"validated against the definition in {known['package']}: HTTPRoute")


GROUP_SPEC = {
    "additionalProperties": False,
    "required": ["leaderWorkerTemplate"],
    "properties": {
        "replicas": {"type": "integer", "minimum": 0},
        "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        "networkConfig": {
            "additionalProperties": False,
            "properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}},
        },
        "rolloutStrategy": {
            "additionalProperties": False,
            "required": ["type"],
            "properties": {
                "type": {"enum": ["RollingUpdate"]},
                "rollingUpdateConfiguration": {
                    "additionalProperties": False,
                    "properties": {
                        key: {"type": "integer"} for key in ("maxSurge", "maxUnavailable")
                    },
                },
            },
        },
        "leaderWorkerTemplate": {
            "additionalProperties": False,
            "required": ["workerTemplate"],
            "properties": {
                "size": {"type": "integer", "minimum": 1},
                "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "None"]},
                "leaderTemplate": {"type": "object"},
                "workerTemplate": {"type": "object"},
            },
        },
    },
}
"""What we use of LeaderWorkerSet v1, written down from the definition in its repository (main,
2026-08-21, after v0.9.0). No package brings the definition itself."""


def test_groups_of_nodes_keep_to_what_is_known_of_their_kind():
    package = pytest.importorskip("kubernetes_validate", reason="NO kubernetes-validate HERE")
    (group,) = of_kind(render_set("multi-node"), "LeaderWorkerSet")
    assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    Draft202012Validator(GROUP_SPEC).validate(group["spec"])
    for key in ("leaderTemplate", "workerTemplate"):
        template = copy.deepcopy(group["spec"]["leaderWorkerTemplate"][key])
        document = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
        for version in (WANTED[0], WANTED[-1]):
            package.utils.validate({**document, "template": template}, version, strict=True)
        template["spec"]["contaners"] = []
        with pytest.raises(package.utils.ValidationError):
            package.utils.validate({**document, "template": template}, WANTED[-1], strict=True)
    NOTES.add(
        "NOT VALIDATED by its definition, which no package brings: LeaderWorkerSet; its pod "
        "templates are, strictly, and its own keys against notes of 2026-08-21"
    )


def test_every_custom_kind_is_rendered_somewhere():
    kinds = {document["kind"] for name in CI_SETS for document in render_set(name)}
    assert kinds >= {*CUSTOM_KINDS, *OWN_TESTS}
    if not HTTP_ROUTE.exists():
        NOTES.add("NOT VALIDATED: HTTPRoute, its definition is missing: make chart-tools")


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
