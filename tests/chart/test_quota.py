"""A ResourceQuota refuses a pod whose containers do not all say what they want: none of ours.

Reckoned from the rendered objects; ``live/test_live_quota.py`` asks Kubernetes itself.
"""

from __future__ import annotations

import pytest
import test_value_sets
from chart_rendering import (
    CI_SETS,
    Document,
    every_container,
    needs_helm,
    pod_templates,
    render_set,
)

pytestmark = needs_helm
BY_DEFAULT = ("requests.cpu", "requests.memory", "limits.memory")
"""What the chart's defaults are enough for; a limit of CPU is for whoever wants one."""
OF_THE_USER = {"first", "beside"}
"""Containers that value sets add, without resources."""


def unsaid(container: Document, counted: tuple[str, ...]) -> list[str]:
    """What a quota counts and a container leaves open; a limit is a request too."""
    resources = container.get("resources", {})
    limits = resources.get("limits", {})
    said = {"limits": limits, "requests": {**limits, **resources.get("requests", {})}}
    return [key for key in counted if key.partition(".")[2] not in said[key.partition(".")[0]]]


def left_open(objects: list[Document], counted: tuple[str, ...]) -> list[tuple[str, str, str]]:
    return [
        (where, container["name"], key)
        for where, template in pod_templates(objects)
        for container in every_container(template)
        if container["name"] not in OF_THE_USER
        for key in unsaid(container, counted)
    ]


@pytest.mark.parametrize("name", CI_SETS)
def test_set_fits_a_quota_of_requests_and_memory(name: str):
    assert left_open(render_set(name), BY_DEFAULT) == []


def test_every_limit_can_be_said():
    objects = test_value_sets.objects("quota on every limit")
    found = left_open(objects, (*BY_DEFAULT, "limits.cpu"))
    assert found == []
