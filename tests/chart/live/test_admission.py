"""Kubernetes' API server takes what the chart renders: every set of values, in every detail.

Objects are applied server-side with unknown fields refused, and every pod template is judged as a
pod in a namespace that enforces the restricted Pod Security Standard.
"""

from __future__ import annotations

from typing import Any

import pytest
import test_value_sets
from chart_rendering import (
    CI_SETS,
    Document,
    needs_helm,
    pod_templates,
    render_set,
)
from cluster_api import ClusterApi, RefusedError
from live_release import Release

pytestmark = [needs_helm, pytest.mark.timeout(180)]
BEYOND_RESTRICTED = {
    "network of the node": "host namespaces",
    "directory of the node": "restricted volume types",
    "capability for RDMA": "unrestricted capabilities",
    # Containers of the user's own, of which the values say nothing more than their images.
    "init container of workers": "allowPrivilegeEscalation",
    "sidecar of workers": "allowPrivilegeEscalation",
}
"""Value sets that ask for what the restricted standard forbids: its words for it."""
GATED = {"taint that is compared": "spec.tolerations[0].operator"}
"""Value sets that a feature gate of the cluster guards, which may be closed: what it then names."""


def rendered(name: str) -> list[Document]:
    return render_set(name) if name in CI_SETS else test_value_sets.objects(name)


def as_pod(template: Document) -> Document:
    metadata = {**template["metadata"], "name": "judged"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def give_what_is_named(api: ClusterApi, namespace: str, objects: list[Document]) -> None:
    """Make the classes, accounts and claims that values name and somebody else has made."""
    for _, template in pod_templates(objects):
        spec = template["spec"]
        if name := spec.get("serviceAccountName"):
            account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
            api.apply(account, namespace)
        priority = spec.get("priorityClassName", "system-")
        if not priority.startswith("system-"):
            made = {"kind": "PriorityClass", "metadata": {"name": priority}, "value": 1}
            api.apply({"apiVersion": "scheduling.k8s.io/v1", **made}, None)
        if name := spec.get("runtimeClassName"):
            made = {"kind": "RuntimeClass", "metadata": {"name": name}, "handler": name}
            api.apply({"apiVersion": "node.k8s.io/v1", **made}, None)


def judge(live: Release, objects: list[Document]) -> list[str]:
    """Apply all in vain; returns the server's warnings.

    Raises:
        RefusedError: one of them was not accepted.
    """
    api = live.plane.api
    give_what_is_named(api, live.namespace, objects)
    warnings: list[str] = []
    for document in objects:
        document = {**document, "metadata": dict(document["metadata"])}
        document["metadata"].pop("namespace", None)
        warnings += api.apply(document, live.namespace, dry=True)
    return warnings


@pytest.mark.parametrize("name", [*CI_SETS, *test_value_sets.RENDERED])
def test_set_is_accepted(live: Release, name: str):
    try:
        warnings = judge(live, rendered(name))
    except RefusedError as error:
        assert name in GATED and GATED[name] in str(error)
        return
    expected = BEYOND_RESTRICTED.get(name)
    if expected:
        assert warnings and all(expected in each for each in warnings), warnings
    else:
        assert warnings == []


@pytest.mark.parametrize("name", [*CI_SETS, *test_value_sets.RENDERED])
def test_pods_of_set_are_accepted_where_restricted_is_enforced(live: Release, name: str):
    objects = rendered(name)
    give_what_is_named(live.plane.api, live.namespace, objects)
    for where, template in pod_templates(objects):
        try:
            live.plane.api.create(as_pod(template), live.namespace, dry=True)
        except RefusedError as error:
            expected = {**BEYOND_RESTRICTED, **GATED}.get(name)
            assert expected and expected in str(error), (where, str(error))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unknown": 1}, "unknown"),
        ({"template": {"spec": {"hostPID": True}}}, "host namespaces"),
    ],
)
def test_a_wrong_object_is_found(live: Release, change: Document, message: str):
    deployment: Any = next(d for d in render_set("cpu-minimal") if d["kind"] == "Deployment")
    spec = {**deployment["spec"], **change}
    if "template" in change:
        spec["template"] = {
            **deployment["spec"]["template"],
            "spec": {**deployment["spec"]["template"]["spec"], **change["template"]["spec"]},
        }
    wrong = {**deployment, "spec": spec}
    try:
        found = judge(live, [wrong])
    except RefusedError as error:
        found = [str(error)]
    assert any(message in each for each in found), found
