"""A namespace with a ResourceQuota takes every pod: each container says what it wants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import test_value_sets
from chart_rendering import Document, needs_helm, pod_templates, set_values
from cluster_api import RefusedError, eventually
from live_release import Plane, Release
from node_agents import add_node
from test_admission import as_pod, give_what_is_named

pytestmark = [needs_helm, pytest.mark.timeout(300)]
REQUESTS = ("requests.cpu", "requests.memory", "limits.memory")
"""What the chart's defaults are enough for; a limit of CPU is for whoever wants one."""


@pytest.fixture(scope="module", autouse=True)
def nodes(plane: Plane) -> Iterator[None]:
    """A node with room for all, for this module alone."""
    add_node(plane.api, "large")
    yield
    plane.api.delete(plane.api.path("v1", "Node", None, "large"))


def set_quota(live: Release, *counted: str) -> None:
    """Enforce a quota that nothing exceeds, and wait until it counts."""
    api = live.plane.api
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "quota"}}
    hard = {key: "900" if key.endswith("cpu") else "9Ti" for key in counted}
    api.apply({**quota, "spec": {"hard": hard}}, live.namespace)
    assert eventually(
        lambda: (
            api.get("v1", "ResourceQuota", live.namespace, "quota").get("status", {}).get("used")
        )
    )


@pytest.mark.parametrize("name", ["cpu-minimal", "canary"])
def test_release_comes_up_under_a_quota(live: Release, name: str):
    set_quota(live, *REQUESTS)
    values = set_values(name)
    text = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "validation-text"}}
    live.plane.api.apply({**text, "data": {"text.txt": "a"}}, live.namespace)
    live.helm("install", values)
    live.waits_for("worker-w8a8", values["variants"][0].get("replicas", 2))
    assert not [each for each in live.why_not() if each[1] == "FailedCreate"]


def test_every_pod_is_taken_where_every_limit_is_counted(live: Release):
    set_quota(live, *REQUESTS, "limits.cpu")
    objects: list[Document] = test_value_sets.objects("quota on every limit")
    give_what_is_named(live.plane.api, live.namespace, objects)
    for where, template in pod_templates(objects):
        try:
            live.plane.api.create(as_pod(template), live.namespace, dry=True)
        except RefusedError as error:
            raise AssertionError(f"{where}: {error}") from error
