"""``helm upgrade`` from one set of values to another: what Kubernetes forbids to change does not.

No cluster is asked: two renderings are compared, object by object.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_rendering import (
    CHART,
    CI_SETS,
    OWN_IMAGES,
    Document,
    changed,
    documents,
    helm,
    needs_helm,
    of_kind,
    pod_templates,
    render,
    set_values,
)

pytestmark = needs_helm
WARM = {"size": "20Gi", "warm": {"enabled": True}}
CHANGES: list[tuple[str, object]] = [
    ("image.gateway.tag", "0.2.0"),
    ("image.worker.tag", "0.2.0"),
    ("image.toolbox.tag", "0.2.0"),
    ("model.maxModelLen", 1024),
    ("model.aliases", ["other"]),
    ("variants.0.replicas", 3),
    ("variants.0.weight", 7),
    ("variants.0.vllmArgs", ["--max-num-seqs=8"]),
    ("variants.0.resources", {"limits": {"memory": "9Gi"}}),
    ("variants.0.nodeSelector", {"disk": "ssd"}),
    ("worker.drainSeconds", 11),
    ("worker.cache", {"size": "20Gi"}),
    ("worker.cache", WARM),
    ("gateway.replicas", 5),
    ("gateway.drain.timeoutSeconds", 90),
    ("gateway.discovery", "dns"),
    ("gateway.service.port", 8080),
    ("gateway.config.admission", {"max_inflight": 9}),
    ("prepare.resources", {"limits": {"memory": "9Gi"}}),
    ("prepare.deadlineSeconds", 99),
    ("podLabels", {"team": "x"}),
    ("networkPolicy.enabled", False),
    ("smokeTest.timeoutSeconds", 5),
]

Key = tuple[str, str]


def by_name(rendered: list[Document]) -> dict[Key, Document]:
    return {(each["kind"], each["metadata"]["name"]): each for each in rendered}


def is_hook(document: Document) -> bool:
    return "helm.sh/hook" in document["metadata"].get("annotations", {})


def immutable(document: Document) -> Any:
    """What Kubernetes does not let anybody change in an object of this kind."""
    spec = document.get("spec", {})
    kind = document["kind"]
    if kind == "Job":
        # A hook is made anew each time (before-hook-creation).
        return None if is_hook(document) else spec
    if kind == "Deployment":
        return spec["selector"]
    if kind == "PersistentVolumeClaim":
        return {key: value for key, value in spec.items() if key != "resources"}
    if kind == "Service":
        return spec.get("clusterIP")
    if kind == "RoleBinding":
        return document["roleRef"]
    return None


@pytest.mark.parametrize("path_and_value", CHANGES, ids=lambda pair: pair[0])
@pytest.mark.parametrize("name", ["cpu-minimal", "canary"])
def test_upgrade_changes_nothing_that_must_not_change(
    name: str, path_and_value: tuple[str, object]
):
    values = set_values(name)
    path, value = path_and_value
    if path == "variants.0.replicas" and "autoscaling" in values["variants"][0]:
        path = "variants.0.autoscaling.maxReplicas"  # who decides there
    before = by_name(render(values))
    after = by_name(render(changed(values, path, value)))
    for key in before.keys() & after.keys():
        assert immutable(before[key]) == immutable(after[key]), key
    # Only Jobs, which are named by their content, and what a switch adds or takes away.
    renamed = {kind for kind, _ in before.keys() ^ after.keys()}
    switched = {"NetworkPolicy", "PersistentVolumeClaim", "PodDisruptionBudget"}
    assert renamed <= {"Job", "Role", "RoleBinding", *switched}


def test_what_must_not_change_is_looked_at():
    """The comparison above finds a Job that kept its name and a Deployment of another selector."""
    rendered = by_name(render(set_values("cpu-minimal")))
    rendered |= by_name(render(changed(set_values("cpu-minimal"), "prepare.run", "argocd")))
    for kind, path in (("Job", "spec.backoffLimit"), ("Deployment", "spec.selector")):
        found = next(doc for key, doc in rendered.items() if key[0] == kind and not is_hook(doc))
        assert immutable(found) != immutable(changed(found, path, {"other": 1}))


@pytest.mark.parametrize("name", CI_SETS)
def test_rendering_twice_gives_the_same(name: str):
    values = [f"--values={path}" for path in (OWN_IMAGES, CHART / "ci" / f"{name}.yaml")]
    rendered = [helm("template", "rel", str(CHART), *values).stdout for _ in range(2)]
    assert rendered[0] and rendered[0] == rendered[1]


@pytest.mark.parametrize("name", CI_SETS)
def test_new_chart_of_the_same_application_restarts_no_pod(name: str, tmp_path: Path):
    copied = tmp_path / "chart"
    shutil.copytree(CHART, copied)
    about = yaml.safe_load((copied / "Chart.yaml").read_text())
    about["version"] = "9.9.9"
    (copied / "Chart.yaml").write_text(yaml.safe_dump(about))
    files = [f"--values={path}" for path in (OWN_IMAGES, CHART / "ci" / f"{name}.yaml")]
    values = [*files, "--namespace", "ns"]
    old, new = (
        documents(helm("template", "rel", str(chart), *values).stdout) for chart in (CHART, copied)
    )
    assert old != new, "the labels of objects name the chart"
    assert pod_templates(old) == pod_templates(new)
    assert by_name(old).keys() == by_name(new).keys()


@pytest.mark.parametrize(
    ("path", "value", "rolled"),
    [
        ("variants.0.weight", 5, set()),
        ("model.aliases", ["other"], set()),
        ("gateway.config.admission", {"max_inflight": 9}, set()),
        ("gateway.drain.timeoutSeconds", 90, {"gateway"}),
        ("gateway.config.access_log", {"ratio": 0.5}, {"gateway"}),
        ("variants.0.vllmArgs", ["--max-num-seqs=8"], {"worker-w8a8"}),
        ("image.worker.tag", "0.2.0", {"worker-w8a8"}),
        ("image.toolbox.tag", "0.2.0", set()),
        ("gateway.replicas", 4, set()),
        ("variants.0.replicas", 2, set()),
    ],
    ids=lambda part: str(part)[:30],
)
def test_change_rolls_what_it_is_about_and_nothing_else(path: str, value: object, rolled: set[str]):
    values = set_values("cpu-minimal")

    def templates(of: Document) -> dict[str, Document]:
        return {
            each["metadata"]["name"].removeprefix("rel-taut-"): each["spec"]["template"]
            for each in of_kind(render(of), "Deployment")
        }

    before, after = templates(values), templates(changed(values, path, value))
    assert {name for name in before if before[name] != after[name]} == rolled
