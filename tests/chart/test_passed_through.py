"""Values that end in one place of one object: there when given, and not there when not."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from chart_rendering import Document, changed, needs_helm, render, set_values, the

pytestmark = needs_helm
CPU = set_values("cpu-minimal")
CANARY = set_values("canary")
GPU = set_values("one-gpu")
POD = "spec.template.spec"
GATEWAY = ("Deployment", "-gateway")
WORKER = ("Deployment", "-worker-w8a8")
LABELS = {"team": "x"}
PEERS = [{"podSelector": {"matchLabels": {"app": "x"}}}]
SLOW = {"scaleDown": {"policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}]}}
EXISTS = [{"key": "x", "operator": "Exists"}]


def at(document: Document, path: str) -> Any:
    """What is at a dotted path; None if nothing is."""
    place: Any = document
    for key in path.split("."):
        if isinstance(place, list):
            place = place[int(key)] if int(key) < len(place) else None
        elif isinstance(place, dict):
            place = place.get(key)
    return place


def pods_metric(what: str, target: str) -> Document:
    return {
        "type": "Pods",
        "pods": {
            "metric": {"name": f"taut_{what}_requests"},
            "target": {"type": "AverageValue", "averageValue": target},
        },
    }


def trigger_of(what: str, target: str) -> Document:
    query = f'sum(taut_{what}_requests{{job="taut-gateway",namespace="ns"}})'
    return {
        "type": "prometheus",
        "name": what,
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": "http://prometheus.monitoring:9090",
            "query": query,
            "threshold": target,
            "ignoreNullValues": "false",
        },
    }


PLACES = [
    # base, value's path, value, (kind, name), place in the object, what is there, and what without
    (CPU, "image.pullSecrets", ["s"], GATEWAY, f"{POD}.imagePullSecrets", [{"name": "s"}], None),
    (CPU, "image.pullPolicy", "Always", WORKER, f"{POD}.containers.0.imagePullPolicy", "Always",
     "IfNotPresent"),
    (CPU, "podLabels", LABELS, WORKER, "spec.template.metadata.labels.team", "x", None),
    (CPU, "podLabels", LABELS, GATEWAY, "spec.template.metadata.labels.team", "x", None),
    (CPU, "worker.priorityClassName", "p", WORKER, f"{POD}.priorityClassName", "p", None),
    (CPU, "worker.runtimeClassName", "r", WORKER, f"{POD}.runtimeClassName", "r", None),
    (CPU, "variants.0.nodeSelector", LABELS, WORKER, f"{POD}.nodeSelector", LABELS, None),
    (CPU, "variants.0.env", {"A": "1"}, WORKER, f"{POD}.containers.0.env.6",
     {"name": "A", "value": "1"}, None),
    (CPU, "variants.0.shmSize", "3Gi", WORKER, f"{POD}.volumes.2.emptyDir.sizeLimit", "3Gi", "1Gi"),
    (CPU, "variants.0.rollout", {"maxSurge": 0, "maxUnavailable": 1}, WORKER,
     "spec.strategy.rollingUpdate", {"maxSurge": 0, "maxUnavailable": 1},
     {"maxSurge": 1, "maxUnavailable": 0}),
    (CPU, "gateway.podAnnotations", LABELS, GATEWAY, "spec.template.metadata.annotations.team",
     "x", None),
    (CPU, "gateway.nodeSelector", LABELS, GATEWAY, f"{POD}.nodeSelector", LABELS, None),
    (CPU, "gateway.tolerations", EXISTS, GATEWAY, f"{POD}.tolerations", EXISTS, None),
    (CPU, "gateway.service.annotations", LABELS, ("Service", "-gateway"), "metadata.annotations",
     LABELS, None),
    (CPU, "gateway.service.type", "LoadBalancer", ("Service", "-gateway"), "spec.type",
     "LoadBalancer", "ClusterIP"),
    (CPU, "modelStore.storageClass", "s", ("PersistentVolumeClaim", ""), "spec.storageClassName",
     "s", None),
    (CPU, "modelStore.accessMode", "ReadWriteMany", ("PersistentVolumeClaim", ""),
     "spec.accessModes", ["ReadWriteMany"], ["ReadWriteOnce"]),
    (CPU, "networkPolicy.gatewayEgress", [{"to": PEERS}], ("NetworkPolicy", "-gateway"),
     "spec.egress.2", {"to": PEERS}, None),
    (CPU, "networkPolicy.gatewayFrom", PEERS, ("NetworkPolicy", "-gateway"),
     "spec.ingress.0.from.0", PEERS[0], None),
    (CPU, "networkPolicy.monitoringFrom", PEERS, ("NetworkPolicy", "-taut-worker"),
     "spec.ingress.0.from.2", PEERS[0],
     {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}),
    (CPU, "smokeTest.apiKey.existingSecret", "s", ("Job", "-smoke"), f"{POD}.containers.0.env.0",
     {"name": "TAUT_API_KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "key"}}}, None),
    (CPU, "smokeTest.pinVariants", False, ("Job", "-smoke"), f"{POD}.containers.0.args.3", None,
     "w8a8"),
    (CANARY, "validation.onUpgrade", False, ("Job", "-validation"),
     "metadata.annotations.helm@sh/hook", "test", "post-upgrade,test"),
    (CPU, "worker.cache.sizeLimit", "3Gi", WORKER, f"{POD}.volumes.1.emptyDir.sizeLimit", "3Gi",
     "10Gi"),
    (CANARY, "httpRoute.hostnames", [], ("HTTPRoute", ""), "spec.hostnames", None,
     ["llm.example.com"]),
    (GPU, "ingress.className", "", ("Ingress", ""), "spec.ingressClassName", None, "nginx"),
    (GPU, "ingress.tlsSecret", "", ("Ingress", ""), "spec.tls", None,
     [{"hosts": ["llm.example.com"], "secretName": "llm-certificate"}]),
    (GPU, "ingress.annotations.team", "x", ("Ingress", ""), "metadata.annotations.team", "x",
     None),
    (GPU, "monitoring.serviceMonitor.labels", LABELS, ("ServiceMonitor", "-worker"),
     "metadata.labels.team", "x", None),
    (GPU, "monitoring.prometheusRule.labels", LABELS, ("PrometheusRule", "-worker"),
     "metadata.labels.team", "x", None),
    (GPU, "monitoring.dashboard.labels", LABELS, ("ConfigMap", "-dashboards"),
     "metadata.labels.team", "x", None),
    (GPU, "gateway.autoscaling.inflightPerReplica", 0, ("ScaledObject", "-gateway"),
     "spec.triggers.0.name", "queued", "inflight"),
    (CANARY, "gateway.autoscaling.inflightPerReplica", 0,
     ("HorizontalPodAutoscaler", "-gateway"), "spec.metrics.1", pods_metric("queued", "20"),
     pods_metric("inflight", "200")),
    (CANARY, "gateway.autoscaling.queuedPerReplica", 0, ("HorizontalPodAutoscaler", "-gateway"),
     "spec.metrics.2", None, pods_metric("queued", "20")),
    (CANARY, "gateway.autoscaling.cpuPercent", 0, ("HorizontalPodAutoscaler", "-gateway"),
     "spec.metrics.0.type", "Pods", "ContainerResource"),
    (CANARY, "gateway.autoscaling.behavior", SLOW, ("HorizontalPodAutoscaler", "-gateway"),
     "spec.behavior", SLOW, None),
    (GPU, "gateway.autoscaling.behavior", SLOW, ("ScaledObject", "-gateway"),
     "spec.advanced.horizontalPodAutoscalerConfig.behavior", SLOW, None),
    (CANARY, "variants.0.autoscaling.behavior", SLOW, ("ScaledObject", "-worker-baseline"),
     "spec.advanced.horizontalPodAutoscalerConfig.behavior", SLOW, None),
    (CANARY, "variants.2.autoscaling.behavior", SLOW,
     ("HorizontalPodAutoscaler", "-worker-w4a16"), "spec.behavior.scaleDown",
     {**SLOW["scaleDown"], "stabilizationWindowSeconds": 600},
     {"stabilizationWindowSeconds": 600}),
    (GPU, "gateway.autoscaling.queuedPerReplica", 0, ("ScaledObject", "-gateway"),
     "spec.triggers.1", None, trigger_of("queued", "10")),
]  # fmt: skip


@functools.cache
def rendered_base(which: str) -> tuple[Document, ...]:
    return tuple(render({"CPU": CPU, "CANARY": CANARY, "GPU": GPU}[which]))


def found(rendered: list[Document], where: tuple[str, str], place: str) -> Any:
    document = the(rendered, *where)
    *parents, last = place.split(".")
    parent = at(document, ".".join(parents)) if parents else document
    return at(parent, last) if "@" not in last else parent.get(last.replace("@", "."))


@pytest.mark.parametrize(
    ("base", "path", "value", "where", "place", "with_it", "without"),
    PLACES,
    ids=[f"{row[1]}-{row[3][0]}" for row in PLACES],
)
def test_value_is_passed_on(
    base: Document,
    path: str,
    value: object,
    where: tuple[str, str],
    place: str,
    with_it: object,
    without: object,
):
    which = "CPU" if base is CPU else "CANARY" if base is CANARY else "GPU"
    assert found(list(rendered_base(which)), where, place) == without
    assert found(render(changed(base, path, value)), where, place) == with_it


ARGUMENTS = [
    ("kvCacheDtype", "fp8", ["--kv-cache-dtype", "fp8"]),
    ("kvCacheGib", 7, ["--kv-cache-gib", "7"]),
    ("kernels", "off", ["--kernels", "off"]),
    ("fusedOps", True, ["--fused-ops"]),
    ("fusedOps", False, ["--no-fused-ops"]),
    ("decodeAttention", True, ["--decode-attention"]),
    ("decodeAttention", False, ["--no-decode-attention"]),
    ("vllmArgs", ["--enforce-eager"], ["--", "--enforce-eager"]),
]


@pytest.mark.parametrize(("key", "value", "arguments"), ARGUMENTS, ids=lambda part: str(part)[:20])
def test_variant_s_settings_become_arguments(key: str, value: object, arguments: list[str]):
    def args(values: Document) -> str:
        (container,) = the(render(values), *WORKER)["spec"]["template"]["spec"]["containers"]
        return " ".join(container["args"])

    plain = changed(CPU, "variants.0", {"name": "w8a8", "checkpoint": "checkpoints/w8a8"})
    assert arguments[0] not in args(plain).split()
    assert args(changed(plain, f"variants.0.{key}", value)).endswith(" ".join(arguments))


def test_workers_read_all_files_at_every_start_when_told():
    def args(values: Document) -> list[str]:
        (container,) = the(render(values), *WORKER)["spec"]["template"]["spec"]["containers"]
        given: list[str] = container["args"]
        return given

    assert "--verify" not in args(CPU)
    told = args(changed(CPU, "worker.verify", "full"))
    assert told[told.index("--verify") + 1] == "full"


def test_workers_ask_for_a_verdict_that_a_key_signed():
    variant = {"name": "w8a8", "checkpoint": "checkpoints/w8a8", "requireVerdict": "PASS"}
    bare = changed(CPU, "variants.0", variant)
    (container,) = the(render(bare), *WORKER)["spec"]["template"]["spec"]["containers"]
    assert "--require-verdict PASS" in " ".join(container["args"])
    assert "--trust" not in container["args"]
    keyed = changed(bare, "variants.0", {**variant, "trust": {"configMap": "keys"}})
    pod = the(render(keyed), *WORKER)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert "--require-verdict PASS --trust /etc/taut/trust/verdict.pub" in " ".join(
        container["args"]
    )
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["trust"] == "/etc/taut/trust"
    assert {"name": "trust", "configMap": {"name": "keys"}} in pod["volumes"]


def test_hub_token_reaches_the_steps_of_prepare_only():
    rendered = render(changed(CPU, "prepare.hubToken.existingSecret", "hub"))
    tokens = [
        str(doc).count("HF_TOKEN")
        for doc in rendered
        if doc["kind"] == "Job" and "prepare" in doc["metadata"]["name"]
    ]
    assert tokens == [3]
    assert sum(str(doc).count("HF_TOKEN") for doc in rendered) == 3
    assert "HF_TOKEN" not in str(render(CPU))


def test_without_an_answer_of_prometheus_the_number_of_pods_stays():
    documents = [*rendered_base("GPU"), *rendered_base("CANARY")]
    triggers = [
        trigger
        for document in documents
        if document["kind"] == "ScaledObject"
        for trigger in document["spec"]["triggers"]
    ]
    assert len(triggers) == 4
    assert all(trigger["metadata"]["ignoreNullValues"] == "false" for trigger in triggers)
