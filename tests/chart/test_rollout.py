"""Guard and rollouts in the chart: gateway's file, journal, rights, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chart_rendering import (
    Document,
    changed,
    gateway_config,
    needs_helm,
    of_kind,
    render,
    set_values,
    template,
    the,
)

from taut_service.config.settings import load_settings

pytestmark = needs_helm
VARIANTS = [
    {"name": "baseline", "checkpoint": "models/m"},
    {"name": "w8a8", "checkpoint": "checkpoints/w8a8", "recipe": "w8a8", "weight": 0},
]
CPU = {**set_values("cpu-minimal"), "variants": VARIANTS}
GUARDED = {**CPU, "guard": {"enabled": True, "baseline": "baseline", "sample": 0.05}}
ALONE = {
    **GUARDED,
    "gateway": {"replicas": 1},
    "rollout": {"enabled": True, "steps": [0, 5, 100], "min_answers": 200},
}
EGRESS = [{"ports": [{"port": 6379, "protocol": "TCP"}]}]
SHARED = {
    **GUARDED,
    "gateway": {"replicas": 3, "redisPassword": {"existingSecret": "redis"}},
    "networkPolicy": {"gatewayEgress": EGRESS},
    "rollout": {
        "enabled": True,
        "store": "redis",
        "redis": {"url": "redis://redis:6379/1", "key_prefix": "team:"},
        "webhook": "https://hooks.example/x",
    },
}


def pod_of(rendered: list[Document]) -> Document:
    spec: Document = the(rendered, "Deployment", "-gateway")["spec"]["template"]["spec"]
    return spec


def rules_of(rendered: list[Document]) -> list[Document]:
    roles = of_kind(rendered, "Role", "-gateway")
    return roles[0]["rules"] if roles else []


@pytest.mark.parametrize("values", [GUARDED, ALONE, SHARED], ids=["guard", "file", "redis"])
def test_the_gateway_reads_what_the_values_say(values: Document, tmp_path: Path):
    rendered = render(values)
    path = tmp_path / "gateway.yaml"
    path.write_text(the(rendered, "ConfigMap", "-gateway")["data"]["gateway.yaml"])
    settings = load_settings(path)
    assert settings.models[0].baseline == "baseline"
    assert settings.guard is not None and settings.guard.sample == 0.05
    rollout = settings.rollout
    if values is GUARDED:
        assert rollout is None
        return
    assert rollout is not None and rollout.events is not None
    deployment = the(rendered, "Deployment", "-gateway")["metadata"]["name"]
    assert (rollout.events.namespace, rollout.events.deployment) == ("ns", deployment)
    mounts = {m["mountPath"] for m in pod_of(rendered)["containers"][0]["volumeMounts"]}
    if values is ALONE:
        assert (rollout.steps, rollout.min_answers) == ((0, 5, 100), 200)
        assert str(rollout.directory) in mounts
    else:
        assert rollout.redis is not None and rollout.redis.password_file is not None
        assert rollout.redis.key_prefix == "team:"
        assert str(rollout.redis.password_file.parent) in mounts
        assert rollout.webhook == "https://hooks.example/x"


def test_without_them_nothing_is_rendered_of_them():
    rendered = render(CPU)
    config = gateway_config(rendered)
    assert not {"guard", "rollout"} & config.keys() and "baseline" not in config["models"][0]
    assert rules_of(rendered) == [] and not of_kind(rendered, "PersistentVolumeClaim", "-rollout")
    assert pod_of(rendered)["automountServiceAccountToken"] is False


def test_the_journal_of_one_gateway_is_a_claim_that_stays_and_one_gateway_at_a_time_has():
    rendered = render(ALONE)
    claim = the(rendered, "PersistentVolumeClaim", "-rollout")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    volumes = {v["name"]: v for v in pod_of(rendered)["volumes"]}
    named = volumes["rollout"]["persistentVolumeClaim"]["claimName"]
    assert named == claim["metadata"]["name"]
    assert the(rendered, "Deployment", "-gateway")["spec"]["strategy"] == {"type": "Recreate"}


def test_a_claim_of_ones_own_takes_its_place():
    rendered = render(changed(ALONE, "rollout.journal", {"existingClaim": "audit"}))
    assert not of_kind(rendered, "PersistentVolumeClaim", "-rollout")
    volumes = {v["name"]: v for v in pod_of(rendered)["volumes"]}
    assert volumes["rollout"]["persistentVolumeClaim"]["claimName"] == "audit"


def test_gateways_that_share_redis_have_no_claim_and_are_surged():
    rendered = render(SHARED)
    assert not of_kind(rendered, "PersistentVolumeClaim", "-rollout")
    strategy = the(rendered, "Deployment", "-gateway")["spec"]["strategy"]
    assert strategy["type"] == "RollingUpdate"


def test_rights_and_the_way_to_the_api_come_with_events_only():
    rendered = render(SHARED)
    deployment = the(rendered, "Deployment", "-gateway")["metadata"]["name"]
    create = {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create"]}
    look = {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["get"]}
    assert rules_of(rendered) == [create, {**look, "resourceNames": [deployment]}]
    assert pod_of(rendered)["automountServiceAccountToken"] is True
    egress = the(rendered, "NetworkPolicy", "-gateway")["spec"]["egress"]
    ports = [{port["port"] for port in rule["ports"]} for rule in egress]
    assert {443, 6443} in ports
    watching = render(changed(SHARED, "gateway.discovery", "kubernetes"))
    assert [rule["resources"][0] for rule in rules_of(watching)] == [
        "endpointslices",
        "events",
        "deployments",
    ]
    without = render(changed(SHARED, "rollout.events", False))
    assert rules_of(without) == [] and "events" not in gateway_config(without)["rollout"]
    assert pod_of(without)["automountServiceAccountToken"] is False
    ports = [
        {port["port"] for port in rule["ports"]}
        for rule in the(without, "NetworkPolicy", "-gateway")["spec"]["egress"]
    ]
    assert {443, 6443} not in ports


REFUSED: list[tuple[Document, str, Any, str]] = [
    (ALONE, "gateway.replicas", 2, "rollout.store: file is the memory of a single gateway, and "
     "gateway.replicas is 2; set rollout.store: redis and rollout.redis.url, or one gateway"),
    (ALONE, "gateway.autoscaling", {"kind": "hpa"}, "and gateway.autoscaling makes several"),
    (ALONE, "guard.enabled", False, "guard.sample: of no use while guard.enabled is false"),
    (ALONE, "guard", {"enabled": False}, "rollout.enabled: rollouts rest on the guard's evidence"),
    (ALONE, "guard.baseline", "bf16", 'guard.baseline: "bf16" is not the name of a variant'),
    (ALONE, "variants", VARIANTS[:1], "guard.baseline: baseline is the only variant"),
    (ALONE, "rollout.enabled", False, "of no use while rollout.enabled is false"),
    (ALONE, "rollout.redis", {"url": "redis://x:1"}, "of no use with rollout.store: file"),
    (SHARED, "rollout.redis", None, "rollout.redis.url: needed with rollout.store: redis"),
    (SHARED, "networkPolicy.gatewayEgress", [], "networkPolicy.gatewayEgress: rollout.redis needs"),
    (changed(ALONE, "rollout.webhook", "http://hooks:80/x"), "rollout.min_answers", 9,
     "networkPolicy.gatewayEgress: rollout.webhook needs"),
    (GUARDED, "gateway.redisPassword", {"existingSecret": "redis"}, "gateway.redisPassword: given"),
    (ALONE, "guard.sampel", 0.1, "'sampel' not allowed"),
    (ALONE, "guard.sample", 2, "/guard/sample"),
    (ALONE, "rollout.directory", "/x", "'directory' not allowed"),
    (ALONE, "rollout.store", "etcd", "/rollout/store"),
    (ALONE, "rollout.steps", [0, 101], "/rollout/steps"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("base", "path", "value", "told"), REFUSED, ids=lambda part: str(part)[:30]
)
def test_refused(base: Document, path: str, value: object, told: str):
    done = template(changed(base, path, value))
    assert done.returncode != 0, "accepted"
    assert told in done.stderr.replace('\\"', '"'), done.stderr
