"""``helm upgrade`` against Kubernetes' own API server and controllers: what it refuses to change
is not changed, and ready gateways stay ready."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chart_rendering import changed, needs_helm, set_values
from cluster_api import RefusedError, eventually
from live_release import Plane, Release
from node_agents import add_node
from test_live_changes import CPU, HPA, OTHER, SIX
from test_upgrades import CHANGES

pytestmark = [needs_helm, pytest.mark.timeout(900)]
GATEWAY, WORKER = "gateway", "worker-w8a8"
CLAIM = "rel-taut-models"
CANARY = set_values("canary")


@pytest.fixture(scope="module", autouse=True)
def nodes(plane: Plane) -> Iterator[None]:
    """A node with room for all, for this module alone."""
    add_node(plane.api, "large")
    yield
    plane.api.delete(plane.api.path("v1", "Node", None, "large"))


def replicas(live: Release, name: str) -> int:
    count: int = live.deployment(name)["spec"]["replicas"]
    return count


@pytest.mark.parametrize("options", [(), ("--server-side=false",)], ids=["apply", "client"])
def test_upgrade_leaves_what_kubectl_scaled(live: Release, options: tuple[str, ...]):
    live.helm("install", SIX, *options)
    for name in (GATEWAY, WORKER):
        live.scale(name, 4)
    for values in (OTHER, SIX):
        live.helm("upgrade", values, *options)
        assert (replicas(live, GATEWAY), replicas(live, WORKER)) == (4, 4)


def test_new_number_against_one_that_was_scaled_is_refused_with_the_way_out(live: Release):
    live.helm("install", SIX)
    live.scale(GATEWAY, 4)
    eight = changed(SIX, "gateway.replicas", 8)
    refused = live.helm("upgrade", eight, done=False)
    assert refused.returncode != 0
    assert "gateway.replicas: 8 wanted, but kubectl set Deployment of" in refused.stderr
    live.scale(GATEWAY, 8)
    live.helm("upgrade", eight)
    assert replicas(live, GATEWAY) == 8


def test_fixed_number_gives_way_to_an_autoscaler_and_no_ready_gateway_goes(live: Release):
    live.helm("install", SIX)
    live.waits_for(GATEWAY, 6)
    live.plane.agents.forget()
    live.helm("upgrade", HPA)
    name = f"rel-taut-{GATEWAY}"
    api = live.plane.api

    def is_watched() -> bool:
        scaler = api.get("autoscaling/v2", "HorizontalPodAutoscaler", live.namespace, name)
        return bool(scaler["status"].get("conditions"))

    assert eventually(is_watched)
    live.helm("upgrade", changed(HPA, "gateway.drain", {"timeoutSeconds": 90}))
    live.waits_for(GATEWAY, 6)
    assert live.plane.agents.least_ready[live.namespace, "gateway"] >= 6


def test_other_weights_leave_every_pod(live: Release):
    two = changed(CPU, "variants.0.weight", 9)
    live.helm("install", CPU)
    live.waits_for(GATEWAY, 1)
    live.waits_for(WORKER, 1)
    before = {pod["metadata"]["uid"] for kind in ("gateway", "worker") for pod in live.pods(kind)}
    live.helm("upgrade", two)
    state = live.deployment(GATEWAY)["status"]
    assert eventually(
        lambda: (
            live.deployment(GATEWAY)["status"]["observedGeneration"]
            == live.deployment(GATEWAY)["metadata"]["generation"]
        )
    ), state
    after = {pod["metadata"]["uid"] for kind in ("gateway", "worker") for pod in live.pods(kind)}
    assert after == before


def test_larger_store_on_a_volume_that_cannot_grow_is_refused_first(live: Release):
    live.helm("install", CPU)
    refused = live.helm("upgrade", changed(CPU, "modelStore.size", "40Gi"), done=False)
    assert "cannot grow" in refused.stderr and "modelStore.size: 40Gi" in refused.stderr


def test_larger_store_grows_by_the_command_that_the_refusal_names(live: Release):
    elastic = changed(CPU, "modelStore.storageClass", "elastic")
    larger = changed(elastic, "modelStore.size", "40Gi")
    live.helm("install", elastic)
    refused = live.helm("upgrade", larger, done=False)
    assert f"kubectl -n {live.namespace} patch pvc {CLAIM} -p" in refused.stderr
    api = live.plane.api
    where = api.path("v1", "PersistentVolumeClaim", live.namespace, CLAIM)
    api.patch(where, {"spec": {"resources": {"requests": {"storage": "40Gi"}}}}, "kubectl")
    live.helm("upgrade", larger)
    live.helm("upgrade", elastic)
    claim = api.get("v1", "PersistentVolumeClaim", live.namespace, CLAIM)
    assert claim["spec"]["resources"]["requests"]["storage"] == "40Gi"


def test_server_refuses_what_the_refusals_forestall(live: Release):
    """The chart's messages are about what Kubernetes really refuses."""
    live.helm("install", CPU)
    api = live.plane.api
    where = api.path("v1", "PersistentVolumeClaim", live.namespace, CLAIM)
    eventually(
        lambda: api.get("v1", "PersistentVolumeClaim", live.namespace, CLAIM)["spec"].get(
            "volumeName"
        )
    )
    for spec in (
        {"resources": {"requests": {"storage": "40Gi"}}},
        {"accessModes": ["ReadWriteMany"]},
        {"storageClassName": "elastic"},
    ):
        with pytest.raises(RefusedError):
            api.patch(where, {"spec": spec})


@pytest.mark.parametrize("name", ["cpu-minimal", "canary"])
def test_every_change_of_values_is_an_upgrade_that_succeeds(live: Release, name: str):
    values = set_values(name)
    text = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "validation-text"}}
    live.plane.api.apply({**text, "data": {"text.txt": "a"}}, live.namespace)
    live.helm("install", values)
    failed = {}
    for path, value in CHANGES:
        result = live.helm("upgrade", changed(values, path, value), done=False)
        if result.returncode:
            failed[path, str(value)] = result.stderr
    live.helm("rollback")
    assert failed == {}


def test_uninstalled_release_can_be_installed_again(live: Release):
    live.helm("install", CPU)
    live.helm("uninstall")
    claims = live.plane.api.list("v1", "PersistentVolumeClaim", live.namespace)
    assert [each["metadata"]["name"] for each in claims] == [CLAIM]
    live.helm("install", CPU)
    live.waits_for(WORKER, 1)
