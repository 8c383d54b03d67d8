"""The keys of a pod reach the pod of every section that has one, and no other pod."""

from __future__ import annotations

from typing import Any

import pytest
from chart_rendering import Document, changed, needs_helm, of_kind, render, set_values, template
from generate import pod_keys

pytestmark = needs_helm
BASE = changed(set_values("canary"), "worker.cache.warm", {"enabled": False})
SECTIONS = {
    "gateway": "-gateway",
    "worker": "-worker-w4a16",
    "variants.2": "-worker-w4a16",
    "prepare": "-prepare",
    "validation": "-validation",
    "smokeTest": "-smoke",
}
SIDE = [{"name": "beside", "image": "x"}]
MOUNT = [{"name": "own", "mountPath": "/own"}]
PROBE = {"failureThreshold": 77}
SPREAD = [{"topologyKey": "rack", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}]
TOLERATED = [{"key": "own", "operator": "Exists"}]
NODES = {"preferredDuringSchedulingIgnoredDuringExecution": []}
CASES: dict[str, tuple[Any, str, Any]] = {
    # key → value, place in the pod template (each: of every container of ours), what is there
    "env": ({"OWN": "1"}, "each.env", {"name": "OWN", "value": "1"}),
    "envFrom": ([{"secretRef": {"name": "s"}}], "each.envFrom", {"secretRef": {"name": "s"}}),
    "extraVolumes": (
        [{"name": "own", "emptyDir": {}}],
        "spec.volumes",
        {"name": "own", "emptyDir": {}},
    ),
    "extraVolumeMounts": (MOUNT, "each.volumeMounts", MOUNT[0]),
    "initContainers": (SIDE, "spec.initContainers", SIDE[0]),
    "sidecars": (SIDE, "spec.containers", SIDE[0]),
    "labels": ({"own": "x"}, "object.labels", {"own": "x"}),
    "annotations": ({"own": "x"}, "object.annotations", {"own": "x"}),
    "podLabels": ({"own": "x"}, "metadata.labels", {"own": "x"}),
    "podAnnotations": ({"own": "x"}, "metadata.annotations", {"own": "x"}),
    "podSecurityContext": ({"fsGroup": 7}, "spec.securityContext", {"fsGroup": 7}),
    "containerSecurityContext": ({"runAsUser": 7}, "each.securityContext", {"runAsUser": 7}),
    "nodeSelector": ({"own": "x"}, "spec.nodeSelector", {"own": "x"}),
    "tolerations": (TOLERATED, "spec.tolerations", TOLERATED[0]),
    "affinity": ({"nodeAffinity": NODES}, "spec.affinity", {"nodeAffinity": NODES}),
    "topologySpreadConstraints": (SPREAD, "spec.topologySpreadConstraints", SPREAD[0]),
    "priorityClassName": ("own", "spec.priorityClassName", "own"),
    "schedulerName": ("own", "spec.schedulerName", "own"),
    "runtimeClassName": ("own", "spec.runtimeClassName", "own"),
    "hostNetwork": (True, "spec.hostNetwork", True),
    "dnsPolicy": ("Default", "spec.dnsPolicy", "Default"),
    "dnsConfig": ({"searches": ["own"]}, "spec.dnsConfig", {"searches": ["own"]}),
    "hostAliases": ([{"ip": "1.2.3.4"}], "spec.hostAliases", {"ip": "1.2.3.4"}),
    "resourceClaims": ([{"name": "c"}], "spec.resourceClaims", {"name": "c"}),
    "serviceAccount": ({"name": "own"}, "spec.serviceAccountName", "own"),
    "startupProbe": (PROBE, "probe.startupProbe", PROBE),
    "readinessProbe": (PROBE, "probe.readinessProbe", PROBE),
    "livenessProbe": (PROBE, "probe.livenessProbe", PROBE),
}
ENDING = ("prepare", "validation", "smokeTest")
"""Pods that end by themselves and have no probes."""
TAKEN = [
    (key, section)
    for key in CASES
    for section in SECTIONS
    if not (key.endswith("Probe") and section in ENDING)
    and (key, section) != ("serviceAccount", "variants.2")
]


def test_every_key_has_a_case():
    assert CASES.keys() == pod_keys().keys()


def the_object(rendered: list[Document], end: str) -> Document:
    (found,) = [
        document
        for document in rendered
        if document["kind"] in ("Deployment", "Job") and document["metadata"]["name"].endswith(end)
    ]
    return found


def places(document: Document, where: str) -> list[Any]:
    """What is at a place: of the object, of the pod, or of each container of ours."""
    part, _, key = where.partition(".")
    template = document["spec"]["template"]
    if part == "object":
        return [document["metadata"].get(key)]
    if part in ("metadata", "spec"):
        return [template[part].get(key)]
    spec = template["spec"]
    ours = [
        each
        for each in [*spec.get("initContainers", []), *spec["containers"]]
        if part == "each" or each is spec["containers"][0]
    ]
    return [each.get(key) for each in ours]


def holds(found: Any, wanted: Any) -> bool:
    if isinstance(found, list):
        return wanted in found
    if isinstance(found, dict) and isinstance(wanted, dict):
        return bool(wanted.items() <= found.items())
    return bool(found == wanted)


@pytest.mark.parametrize(("key", "section"), TAKEN)
def test_key_reaches_the_pod(key: str, section: str):
    value, where, wanted = CASES[key]
    end = SECTIONS[section]
    before = the_object(render(BASE), end)
    after = the_object(render(changed(BASE, f"{section}.{key}", value)), end)
    assert not any(holds(found, wanted) for found in places(before, where))
    assert all(holds(found, wanted) for found in places(after, where)), places(after, where)


@pytest.mark.parametrize(
    ("key", "section"),
    [(key, section) for key in CASES for section in SECTIONS if (key, section) not in TAKEN],
)
def test_key_that_a_pod_has_no_use_for_is_refused(key: str, section: str):
    done = template(changed(BASE, f"{section}.{key}", CASES[key][0]))
    assert done.returncode != 0 and f"'{key}' not allowed" in done.stderr


@pytest.mark.parametrize("section", ["gateway", "prepare", "validation", "variants.2"])
def test_keys_of_one_section_reach_no_other_pod(section: str):
    before, after = (
        {
            (each["kind"], each["metadata"]["name"]): each["spec"]["template"]
            for kind in ("Deployment", "Job")
            for each in of_kind(rendered, kind)
        }
        for rendered in (render(BASE), render(changed(BASE, f"{section}.env", {"OWN": "1"})))
    )
    differ = [name for (_, name) in before if before[_, name] != after[_, name]]
    assert [name.endswith(SECTIONS[section]) for name in differ] == [True]
