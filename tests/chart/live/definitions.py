"""CustomResourceDefinitions of the kinds that the chart renders and Kubernetes does not have.

KEDA's and the Prometheus operator's are made from models on PyPI, HTTPRoute's from an npm package
(``requirements/tools.py``). No package brings LeaderWorkerSet's and InferencePool's: objects of
these are stored as they are, and their pod templates are judged as pods.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from cluster_api import ClusterApi, RefusedError, eventually

Document = dict[str, Any]
KEDA, PROMETHEUS = "cloudcoil.models.keda.v1alpha1", "cloudcoil.models.prometheus_operator.v1"
KINDS = {
    "ScaledObject": ("keda.sh", "v1alpha1", "scaledobjects", KEDA),
    "ServiceMonitor": ("monitoring.coreos.com", "v1", "servicemonitors", PROMETHEUS),
    "PrometheusRule": ("monitoring.coreos.com", "v1", "prometheusrules", PROMETHEUS),
    "HTTPRoute": ("gateway.networking.k8s.io", "v1", "httproutes", "npm"),
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", None),
    "InferencePool": ("inference.networking.k8s.io", "v1", "inferencepools", None),
}
HTTP_ROUTE = Path(sys.prefix) / "share" / "chart-definitions" / "HTTPRoute.json"
ANYTHING: Document = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
KEPT = (
    "type",
    "required",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "nullable",
)


def install(api: ClusterApi) -> None:
    """Make all definitions, and wait until their kinds are served."""
    for kind, (group, version, plural, source) in KINDS.items():
        api.apply(_definition(kind, group, version, plural, _spec(kind, source)), None)
    for kind, (group, version, _, _) in KINDS.items():
        api_version = f"{group}/{version}"
        assert eventually(lambda a=api_version, k=kind: _is_served(api, a, k)), kind


def _is_served(api: ClusterApi, api_version: str, kind: str) -> bool:
    try:
        api.path(api_version, kind, None)
    except (RefusedError, KeyError):
        return False
    return True


def _definition(kind: str, group: str, version: str, plural: str, spec: Document) -> Document:
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    schema = {"type": "object", "properties": {"spec": spec, "status": ANYTHING}}
    served = {
        "name": version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }
    # Groups of *.k8s.io are protected: the annotation says that their maintainers did not look.
    notes = {"api-approved.kubernetes.io": "unapproved, for tests"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}", "annotations": notes},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [served]},
    }


def _spec(kind: str, source: str | None) -> Document:
    if source is None:
        return ANYTHING
    if source == "npm":
        return structural(json.loads(HTTP_ROUTE.read_text())["schema"]["properties"]["spec"], {})
    schema = getattr(importlib.import_module(source), kind).model_json_schema()
    return structural(schema["properties"]["spec"], schema["$defs"])


def structural(schema: Document, definitions: Document) -> Document:
    """A schema as a CustomResourceDefinition may have it: without references and ``null``."""
    if "$ref" in schema:
        return structural(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    choices = [each for each in schema.get("anyOf", []) if each.get("type") != "null"]
    if len(choices) == 1:
        return structural(choices[0], definitions)
    if {each.get("type") for each in choices} == {"integer", "string"}:
        return {"x-kubernetes-int-or-string": True}
    if choices or "type" not in schema:
        return {"x-kubernetes-preserve-unknown-fields": True}
    result = {key: schema[key] for key in KEPT if key in schema}
    for key in ("properties", "items", "additionalProperties"):
        below = schema.get(key)
        if key == "properties" and below:
            result[key] = {name: structural(each, definitions) for name, each in below.items()}
        elif isinstance(below, dict) and below:
            result[key] = structural(below, definitions)
    if result["type"] == "object" and not result.keys() & {"properties", "additionalProperties"}:
        return ANYTHING
    return result
