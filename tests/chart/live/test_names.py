"""Ranks of a group find a first rank that waits for them, as Kubernetes' EndpointSlices say.

LeaderWorkerSet's controller is in no package: what it makes of a group is put in its place.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chart_rendering import Document, needs_helm, of_kind, render_set, the
from cluster_api import eventually
from live_release import Plane, Release
from node_agents import add_node
from test_admission import as_pod, give_what_is_named, judge

pytestmark = [needs_helm, pytest.mark.timeout(120)]
NAME = "leaderworkerset.sigs.k8s.io/name"


@pytest.fixture(scope="module", autouse=True)
def nodes(plane: Plane) -> Iterator[None]:
    """A node with room for a group, for this module alone."""
    add_node(plane.api, "large", resources={"nvidia.com/gpu": 8, "rdma/hca": 8})
    yield
    plane.api.delete(plane.api.path("v1", "Node", None, "large"))


def service_of_the_group(name: str) -> Document:
    """What LeaderWorkerSet makes beside a group of this name."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {NAME: name}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def first_rank(group: Document) -> Document:
    """The pod that LeaderWorkerSet makes first."""
    name = group["metadata"]["name"]
    pod = as_pod(group["spec"]["leaderWorkerTemplate"]["leaderTemplate"])
    pod["metadata"] |= {"name": f"{name}-0", "labels": {**pod["metadata"]["labels"], NAME: name}}
    pod["spec"] = {**pod["spec"], "hostname": f"{name}-0", "subdomain": name}
    return pod


def endpoints(live: Release, service: str) -> list[Document]:
    slices = live.plane.api.list("discovery.k8s.io/v1", "EndpointSlice", live.namespace)
    return [
        endpoint
        for each in slices
        if each["metadata"]["labels"]["kubernetes.io/service-name"] == service
        for endpoint in each["endpoints"] or []
    ]


def test_followers_find_a_first_rank_that_waits_for_them(live: Release):
    api = live.plane.api
    rendered = render_set("multi-node")
    give_what_is_named(api, live.namespace, rendered)
    judge(live, rendered)
    for service in of_kind(rendered, "Service"):
        api.apply(service, live.namespace)
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Ti"}}}
    models = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"}}
    api.apply({**models, "spec": claim}, live.namespace)
    group = the(rendered, "LeaderWorkerSet")
    name = group["metadata"]["name"]
    # It makes none where the name is taken, and then nobody finds a rank that is not ready.
    api.create(service_of_the_group(name), live.namespace)
    api.create(first_rank(group), live.namespace)
    (found,) = eventually(lambda: endpoints(live, name)) or [None]
    assert found is not None, live.why_not()
    assert found["hostname"] == f"{name}-0" and found["conditions"]["ready"]
    (to_gateways,) = eventually(lambda: endpoints(live, "rel-taut-worker-fp8")) or [None]
    assert to_gateways is not None and not to_gateways["conditions"]["ready"]
