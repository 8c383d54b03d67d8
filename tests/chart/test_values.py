"""Wrong values are refused before anything is rendered, and the message names the key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from chart_rendering import (
    CHART,
    DEFAULTS,
    Document,
    changed,
    needs_helm,
    set_values,
    template,
)

pytestmark = needs_helm
SCHEMA: Document = json.loads((CHART / "values.schema.json").read_text())
CPU = set_values("cpu-minimal")
CANARY = set_values("canary")
GPU = set_values("one-gpu")
AIR_GAPPED = set_values("air-gapped")
ROLLOUT = set_values("rollout")
NO_RECIPE = changed(CPU, "variants", [{"name": "w8a8", "checkpoint": "checkpoints/w8a8"}])

REFUSED = [
    # where, what, words that the message must have
    ("replcas", 2, ["'replcas' not allowed"]),
    ("variants.0.replcas", 2, ["/variants/0", "'replcas' not allowed"]),
    ("variants.0.name", "W8A8", ["/variants/0/name", "pattern"]),
    ("variants.0.name", "w" * 25, ["/variants/0/name", "maxLength"]),
    ("variants.0.checkpoint", "/etc", ["/variants/0/checkpoint", "pattern"]),
    ("variants.0.checkpoint", "a/../../etc", ["/variants/0/checkpoint", "pattern"]),
    ("validation.text.path", "../etc/passwd", ["/validation/text/path", "pattern"]),
    ("variants.0.weight", -1, ["/variants/0/weight", "minimum"]),
    ("variants.0.weight", "5", ["/variants/0/weight", "want number"]),
    ("variants.0.replicas", 1.5, ["/variants/0/replicas", "want integer"]),
    ("variants.0.resources", {"limit": {}}, ["/variants/0/resources", "'limit' not allowed"]),
    ("variants.0.resources", {"limits": {"memory": "6 GB"}}, ["/variants/0/resources/limits"]),
    ("variants.0.kernels", "on", ["/variants/0/kernels", "'require', 'prefer', 'off'"]),
    ("variants.0.kvCacheDtype", "int4", ["/variants/0/kvCacheDtype"]),
    ("variants.0.vllmArgs", "--x", ["/variants/0/vllmArgs", "want array"]),
    ("variants.0.multiNode", {"size": 1}, ["/variants/0/multiNode/size", "minimum"]),
    (
        "variants.0.autoscaling",
        {"kind": "keda", "minReplicas": 1, "maxReplicas": 2},
        ["/variants/0/autoscaling", "'tokensPerReplica'"],
    ),
    (
        "variants.0.autoscaling",
        {"kind": "hpa", "minReplicas": 1, "maxReplicas": 2},
        ["/variants/0/autoscaling", "'podMetric'"],
    ),
    ("variants.0.gateway", {"golden": {"prompt": "x"}}, ["golden", "'expected_text'"]),
    ("variants.0.gateway", {"discover": {}}, ["'discover' not allowed"]),
    ("model.name", "", ["/model/name"]),
    ("worker.verify", "never", ["/worker/verify", "'recorded', 'full'"]),
    ("model.maxModelLen", 0, ["/model/maxModelLen", "minimum"]),
    ("model.source", "--recipe", ["/model/source", "pattern"]),
    ("model.gateway.sticky", "cookie", ["/model/gateway/sticky"]),
    ("image.gateway.digest", "sha256:abc", ["/image/gateway/digest", "pattern"]),
    ("image.gateway.tag", "a b", ["/image/gateway/tag", "pattern"]),
    ("image.pullPolicy", "Sometimes", ["/image/pullPolicy"]),
    ("gateway.replicas", 0, ["/gateway/replicas", "minimum"]),
    ("gateway.discovery", "consul", ["/gateway/discovery", "'dns', 'kubernetes'"]),
    ("gateway.config", {"models": []}, ["/gateway/config", "'models' not allowed"]),
    ("gateway.config", {"listen": {}}, ["/gateway/config", "'listen' not allowed"]),
    ("gateway.config", {"admission": {"max_inflght": 1}}, ["'max_inflght' not allowed"]),
    ("gateway.config", {"admission": {"max_inflight": 0}}, ["max_inflight", "minimum"]),
    ("gateway.drain.timeoutSeconds", 0, ["/gateway/drain/timeoutSeconds", "minimum"]),
    ("gateway.service.type", "ExternalName", ["/gateway/service/type"]),
    ("gateway.autoscaling.kind", "vpa", ["/gateway/autoscaling/kind"]),
    ("gateway.autoscaling.cpuPercent", 101, ["/gateway/autoscaling/cpuPercent", "maximum"]),
    ("gateway.service.port", 70000, ["/gateway/service/port", "maximum"]),
    ("gateway.listenHost", "localhost", ["/gateway/listenHost", "'0.0.0.0', '::'"]),
    ("gateway.apiKeys.existingSecret", "Not_A_Name", ["/gateway/apiKeys/existingSecret"]),
    ("gateway.apiKeys.key", "a/b", ["/gateway/apiKeys/key", "pattern"]),
    ("gateway.tls", {"secret": "x"}, ["/gateway/tls", "'secret' not allowed"]),
    ("gateway.tolerations", [{"effect": "Never"}], ["/gateway/tolerations/0/effect"]),
    ("worker.startup", "ready", ["/worker/startup", "'token', 'health'"]),
    ("worker.startupSeconds", 1, ["/worker/startupSeconds", "minimum"]),
    ("worker.gpuResource", "gpu", ["/worker/gpuResource", "pattern"]),
    ("worker.cache", {"size": "plenty"}, ["/worker/cache/size", "pattern"]),
    ("worker.cache", {"warm": True}, ["/worker/cache/warm", "want object"]),
    ("worker.cache", {"warm": {"enabled": "yes"}}, ["/worker/cache/warm/enabled", "boolean"]),
    ("variants.0.artifact", {"pullPolicy": "Never"}, ["/variants/0/artifact", "'reference'"]),
    ("variants.0.artifact", {"reference": "-x"}, ["/variants/0/artifact/reference", "pattern"]),
    ("variants.0.gpus", -1, ["/variants/0/gpus", "minimum"]),
    ("variants.0.env", {"A": 1}, ["/variants/0/env/A", "want string"]),
    ("variants.0.rollout", {"maxSurge": 1}, ["/variants/0/rollout", "'maxUnavailable'"]),
    ("prepare.copy.directories", [{"from": "s3:x"}], ["/prepare/copy/directories/0", "'to'"]),
    (
        "prepare.copy.directories",
        [{"from": "bucket/x", "to": "a"}],
        ["/prepare/copy/directories/0/from", "pattern"],
    ),
    (
        "prepare.copy.directories",
        [{"from": "s3:x", "to": "../a"}],
        ["/prepare/copy/directories/0/to", "pattern"],
    ),
    ("validation.latency.requests", 3, ["/validation/latency/requests", "minimum"]),
    ("validation.latency.concurrency", [], ["/validation/latency/concurrency", "minItems"]),
    ("validation.latency.concurrency", 8, ["/validation/latency/concurrency", "want array"]),
    ("validation.sequences", 1, ["/validation/sequences", "minimum"]),
    ("smokeTest.apiKey", "secret", ["/smokeTest/apiKey", "want object"]),
    ("ingress.host", "Not a host", ["/ingress/host", "pattern"]),
    ("podLabels", ["x"], ["/podLabels", "want object"]),
    ("fullnameOverride", "a" * 31, ["/fullnameOverride", "maxLength"]),
    ("modelStore.size", "lots", ["/modelStore/size"]),
    ("modelStore.accessMode", "ReadWriteTwice", ["/modelStore/accessMode"]),
    ("prepare.device", "tpu", ["/prepare/device"]),
    ("validation.through", "gateway", ["/validation/through"]),
    ("monitoring.serviceMonitor.interval", "often", ["/monitoring/serviceMonitor/interval"]),
    ("httpRoute.requestTimeout", "1800", ["/httpRoute/requestTimeout"]),
    ("keda.prometheusAddress", "prometheus:9090", ["/keda/prometheusAddress", "pattern"]),
]


@pytest.mark.parametrize(("path", "value", "words"), REFUSED, ids=lambda part: str(part)[:40])
def test_schema_refuses(path: str, value: object, words: list[str]):
    done = template(changed(CPU, path, value))
    assert done.returncode != 0, "accepted"
    assert done.stdout == ""
    for word in words:
        assert word in done.stderr, done.stderr


LEFT_BLANK = [
    ("gateway", "at '': missing property 'gateway'"),
    ("gateway.replicas", "at '/gateway': missing property 'replicas'"),
    ("worker.cache.warm", "at '/worker/cache': missing property 'warm'"),
    ("prepare.copy.image.repository", "at '/prepare/copy/image': missing property 'repository'"),
    ("guard", "missing property 'guard'"),
    ("commonLabels", "missing property 'commonLabels'"),
]


@pytest.mark.parametrize(("path", "message"), LEFT_BLANK)
def test_a_key_left_blank_is_named(path: str, message: str):
    """Helm drops its default as well, on which templates would fail, or which they take for 0."""
    done = template(changed(CPU, path, None))
    assert done.returncode != 0 and done.stdout == ""
    assert message in done.stderr, done.stderr


def blank(values: Document, path: str = "") -> Iterator[str]:
    """Paths of all defaults that no empty text is."""
    for key, value in values.items():
        if value != "" and key not in ("resources", "initResources"):
            yield f"{path}{key}"
            if isinstance(value, dict) and key not in OPEN:
                yield from blank(value, f"{path}{key}.")


OPEN = ("podSecurityContext", "containerSecurityContext", "labels")
"""Maps in which null takes a key away on purpose."""


@pytest.mark.parametrize("path", list(blank(DEFAULTS)))
def test_schema_wants_every_default(path: str):
    *parents, key = path.split(".")
    section: Any = SCHEMA
    for name in parents:
        section = section["properties"][name]
        section = SCHEMA["definitions"].get(section.get("$ref", "").rpartition("/")[2], section)
    assert key in section["required"]


CROSSED = [
    (CPU, "variants.0.weight", 0, "variants: the weights are all 0"),
    (CANARY, "variants.1.name", "baseline", 'variants: two entries are named "baseline"'),
    (CPU, "variants.0.trust", {"configMap": "keys"}, "goes with requireVerdict: PASS"),
    (CPU, "variants.0.requireVerdict", "PASS", "has no verdict yet"),
    (CANARY, "keda.prometheusAddress", "", "keda.prometheusAddress: needed"),
    (CANARY, "validation.candidate", "w2", 'validation.candidate: "w2" is not the name'),
    (CANARY, "validation.text.path", "x.txt", "validation.text: give either configMap or path"),
    (CANARY, "validation.text", {"configMap": ""}, "validation.text: give either"),
    (CANARY, "variants.0.multiNode", {"size": 2}, "variants[baseline].autoscaling: not offered"),
    (CPU, "variants.0.multiNode", {"size": 2}, "multiNode needs ReadWriteMany"),
    (CANARY, "httpRoute.parentRefs", [], "httpRoute.parentRefs: needed"),
    (GPU, "gateway.adminKey.existingSecret", "", "gateway.adminKey.existingSecret: needed"),
    (GPU, "gateway.config.rate_limits", {}, "gateway.redisPassword: given without"),
    (GPU, "networkPolicy.gatewayEgress", [], "networkPolicy.gatewayEgress: gateway.config."),
    (GPU, "ingress.host", "", "ingress.host: needed"),
    (
        GPU,
        "gateway.autoscaling",
        {"kind": "keda", "inflightPerReplica": 0},
        "gateway.autoscaling: kind keda needs inflightPerReplica or queuedPerReplica",
    ),
    (
        CANARY,
        "gateway.autoscaling",
        {"kind": "hpa", "cpuPercent": 0},
        "gateway.autoscaling: kind hpa needs cpuPercent, inflightPerReplica or queuedPerReplica",
    ),
    (
        CANARY,
        "gateway.autoscaling.minReplicas",
        9,
        "gateway.autoscaling.minReplicas: 9 is more than maxReplicas 8",
    ),
    (
        CPU,
        "gateway.autoscaling.behavior",
        {"scaleDown": {"stabilizationWindowSeconds": 60}},
        "gateway.autoscaling.behavior: unused with kind none",
    ),
    (
        GPU,
        "monitoring.serviceMonitor.scrapeTimeout",
        "1m",
        "monitoring.serviceMonitor.scrapeTimeout: 1m is more than interval 15s",
    ),
    (
        CANARY,
        "variants.0.autoscaling.minReplicas",
        7,
        "variants[baseline].autoscaling.minReplicas: 7 is more than maxReplicas 6",
    ),
    (
        CPU,
        "variants.0.rollout",
        {"maxSurge": 0, "maxUnavailable": 0},
        "variants[w8a8].rollout: maxSurge and maxUnavailable cannot both be 0",
    ),
    (CPU, "model.source", "", "model.source: needed to compress by variants[w8a8].recipe"),
    (
        CPU,
        "variants.0.artifact",
        {"reference": "x/y"},
        "variants[w8a8].recipe: a checkpoint is compressed in the model store",
    ),
    (CPU, "worker", {"cache": {"warm": {"enabled": True}}}, "worker.cache.warm: needs a claim"),
    (GPU, "worker.cache.size", "9Gi", "worker.cache: give either existingClaim or size"),
    (
        AIR_GAPPED,
        "prepare.copy",
        {"directories": [{"from": "store:x", "to": "a"}]},
        "prepare.copy.directories: the prepare Job copies them, and prepare.enabled is false",
    ),
    (GPU, "prepare.device", "cpu", "prepare.gpus: of no use: prepare.device is cpu"),
    (CPU, "variants.0.servedName", "x", "variants[w8a8].servedName: of no use: it goes with urls"),
    (
        CPU,
        "variants.0.apiKey",
        {"existingSecret": "x"},
        "variants[w8a8].apiKey: of no use: it goes",
    ),
    (CPU, "variants.0.gpuResource", "a.b/c", "variants[w8a8].gpuResource: of no use: it goes with"),
    (CPU, "variants.0.gpus", 1, "variants[w8a8].kvCacheGib: of no use: it is of workers on a CPU"),
    (CANARY, "variants.0.replicas", 2, "variants[baseline].replicas: of no use: autoscaling"),
    (
        CANARY,
        "variants.0.autoscaling.podMetric",
        {"name": "x", "averageValue": 1},
        "variants[baseline].autoscaling.podMetric: of no use: kind is keda",
    ),
    (
        CANARY,
        "variants.2.autoscaling.tokensPerReplica",
        5,
        "variants[w4a16].autoscaling.tokensPerReplica: of no use: kind is hpa",
    ),
    (
        CPU,
        "modelStore",
        {"existingClaim": "x", "storageClass": "fast"},
        "modelStore.storageClass: of no use: no claim is made",
    ),
    (CPU, "worker.cache.storageClass", "fast", "worker.cache.storageClass: of no use: it goes"),
    (
        ROLLOUT,
        "rollout.journal",
        {"existingClaim": "x", "storageClass": "fast"},
        "rollout.journal.storageClass: of no use",
    ),
    (
        CPU,
        "rollout",
        {"journal": {"existingClaim": "x"}, "enabled": True, "store": "redis"},
        "rollout.journal.existingClaim: of no use",
    ),
    (CPU, "prepare.copy.env", {"A": "b"}, "prepare.copy.env: of no use: it goes with prepare."),
    (CPU, "prepare.copy.existingSecret", "x", "prepare.copy.existingSecret: of no use: it goes"),
    (
        NO_RECIPE,
        "prepare.compressArgs",
        ["--x"],
        "prepare.compressArgs: of no use: no variant has a",
    ),
    (CANARY, "validation.gpus", 1, "validation.gpus: of no use: validation.device is cpu"),
    (CANARY, "validation.acceptLowerBound", True, "validation.acceptLowerBound: of no use: only"),
    (
        CANARY,
        "model.gateway.brown_out.to",
        "w2",
        'model.gateway.brown_out.to: "w2" is not the name of a variant (baseline, w8a8, w4a16)',
    ),
    (
        CANARY,
        "validation.candidate",
        "baseline",
        "validation.candidate: the same variant as validation.baseline",
    ),
    (
        CANARY,
        "validation.through",
        "servers",
        "validation.through: servers tell a lower bound of mean_kl only",
    ),
    (
        AIR_GAPPED,
        "variants.1.artifact",
        {"reference": "x/y"},
        "validation.through: files loads checkpoints from the model store, and variants[baseline]",
    ),
]


@pytest.mark.parametrize(
    ("values", "path", "value", "message"), CROSSED, ids=lambda part: str(part)[:40]
)
def test_values_that_do_not_go_together_are_refused(
    values: dict[str, object], path: str, value: object, message: str
):
    assert template(values).returncode == 0
    done = template(changed(values, path, value))
    assert done.returncode != 0, "accepted"
    assert message in done.stderr, done.stderr
