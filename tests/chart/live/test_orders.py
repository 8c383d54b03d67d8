"""Installations end with running workers, as Kubernetes' own scheduler and controllers order them.

One GPU on a node with a taint, a node without a GPU, and a volume that is made where its first pod
runs. Four runs each, since the order in which pods come is chance.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chart_rendering import Document, changed, needs_helm
from cluster_api import eventually
from live_release import Plane, Release
from node_agents import add_node
from test_scheduling import DEFAULT, GPU, ONE, ZONE

pytestmark = [needs_helm, pytest.mark.timeout(300)]
WORKER = "worker-w4a16"
SETS = {
    "default": DEFAULT,
    "one-gpu": ONE,
    "pod": changed(DEFAULT, "prepare", {"run": "pod"}),
    "beside the workers": changed(DEFAULT, "prepare", {"holdGpus": False}),
}


@pytest.fixture(scope="module")
def nodes(plane: Plane) -> Iterator[None]:
    """A node without a GPU and one with a single GPU, for this module alone."""
    add_node(plane.api, "cpu", labels={ZONE: "a"})
    labels = {ZONE: "a", **ONE["variants"][0]["nodeSelector"]}
    add_node(plane.api, "gpu", labels=labels, taint=GPU, resources={GPU: 1})
    yield
    for name in ("cpu", "gpu"):
        plane.api.delete(plane.api.path("v1", "Node", None, name))


def give_compile_cache(live: Release, values: Document) -> None:
    """The claim that ``one-gpu`` names; it has no volume before its first pod."""
    name = values.get("worker", {}).get("cache", {}).get("existingClaim")
    if name:
        spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "5Gi"}}}
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": spec}
        live.plane.api.apply({**claim, "metadata": {"name": name}}, live.namespace)


def install(live: Release, values: Document) -> None:
    give_compile_cache(live, values)
    runtime = {"kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nvidia"}
    live.plane.api.apply({"apiVersion": "node.k8s.io/v1", **runtime}, None)
    live.helm("install", values)


@pytest.mark.parametrize("run", range(4))
@pytest.mark.parametrize("name", ["default", "one-gpu", "pod"])
def test_one_gpu_comes_up(live: Release, nodes: None, name: str, run: int):
    install(live, SETS[name])
    live.waits_for(WORKER, 1)
    (worker,) = live.pods("worker")
    assert worker["spec"]["nodeName"] == "gpu"


def test_volume_that_is_made_where_no_worker_fits_is_seen(live: Release, nodes: None):
    """What ``prepare.holdGpus`` is for: the stand-in for nodes does not let everything come up."""
    api = live.plane.api
    node = api.path("v1", "Node", None, "gpu")
    api.patch(node, {"spec": {"unschedulable": True}})
    try:
        install(live, SETS["beside the workers"])
    finally:
        api.patch(node, {"spec": {"unschedulable": None}})
    assert not eventually(lambda: live.ready(WORKER), 10)
    assert any("node affinity" in message for _, _, message in live.why_not()), live.why_not()


@pytest.mark.parametrize("run", range(2))
def test_new_recipe_is_compressed_beside_the_worker_that_serves(
    live: Release, nodes: None, run: int
):
    install(live, DEFAULT)
    live.waits_for(WORKER, 1)
    other = changed(DEFAULT, "variants.0.recipe", "w8a8")
    other = changed(other, "variants.0.checkpoint", "checkpoints/w8a8")
    # The only GPU serves: the old worker goes first, as the README says of a single GPU.
    other = changed(other, "variants.0.rollout", {"maxSurge": 0, "maxUnavailable": 1})
    live.helm("upgrade", other)
    live.waits_for(WORKER, 1)
