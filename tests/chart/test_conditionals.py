"""Every switch of the values does what its description says, and nothing else."""

from __future__ import annotations

import json
import re

import pytest
from chart_rendering import (
    CHART,
    Document,
    changed,
    helm,
    needs_helm,
    of_kind,
    render,
    render_set,
    set_values,
    the,
)

pytestmark = needs_helm
CPU = set_values("cpu-minimal")
CANARY = set_values("canary")
GPU = set_values("one-gpu")
MANY = changed(CPU, "modelStore.accessMode", "ReadWriteMany")


def names(rendered: list[Document]) -> set[tuple[str, str]]:
    """Kinds and names, without the release and the hash of the Job's content."""
    return {
        (doc["kind"], re.sub("^rel-taut-|(?<=prepare)-[0-9a-f]{8}$", "", doc["metadata"]["name"]))
        for doc in rendered
    }


SWITCHES = [
    # base, what is changed, what it takes away, what it adds
    (CPU, "modelStore.existingClaim", "x", {("PersistentVolumeClaim", "models")}, set()),
    (CPU, "gateway.disruptionBudget.enabled", False, {("PodDisruptionBudget", "gateway")}, set()),
    (
        CPU,
        "gateway.discovery",
        "kubernetes",
        set(),
        {("Role", "gateway"), ("RoleBinding", "gateway")},
    ),
    (
        CPU,
        "gateway.autoscaling.kind",
        "hpa",
        set(),
        {("HorizontalPodAutoscaler", "gateway")},
    ),
    (
        CPU,
        "networkPolicy.enabled",
        False,
        {("NetworkPolicy", part) for part in ("gateway", "worker", "jobs", "prepare")},
        set(),
    ),
    (CPU, "smokeTest.enabled", False, {("Job", "smoke")}, set()),
    (CPU, "variants.0.replicas", 2, set(), {("PodDisruptionBudget", "worker-w8a8")}),
    (
        CPU,
        "monitoring.serviceMonitor.enabled",
        True,
        set(),
        {("ServiceMonitor", "gateway"), ("ServiceMonitor", "worker")},
    ),
    (
        CPU,
        "monitoring.prometheusRule.enabled",
        True,
        set(),
        {("PrometheusRule", part) for part in ("cluster", "gateway", "worker")},
    ),
    (CPU, "monitoring.dashboard.enabled", True, set(), {("ConfigMap", "dashboards")}),
    (CPU, "ingress", {"enabled": True, "host": "x.example"}, set(), {("Ingress", "gateway")}),
    (
        CPU,
        "httpRoute",
        {"enabled": True, "parentRefs": [{"name": "g"}]},
        set(),
        {("HTTPRoute", "gateway")},
    ),
    (CANARY, "validation.enabled", False, {("Job", "validation")}, set()),
    (
        MANY,
        "variants.0.multiNode",
        {"size": 2},
        {("Deployment", "worker-w8a8")},
        {("LeaderWorkerSet", "ranks-w8a8"), ("NetworkPolicy", "worker-w8a8-ranks")},
    ),
]


@pytest.mark.parametrize(
    ("base", "path", "value", "gone", "added"), SWITCHES, ids=lambda part: str(part)[:40]
)
def test_switch(
    base: Document,
    path: str,
    value: object,
    gone: set[tuple[str, str]],
    added: set[tuple[str, str]],
):
    before, after = names(render(base)), names(render(changed(base, path, value)))
    assert (before - after, after - before) == (gone, added)


def worker(rendered: list[Document], name: str = "-worker-w8a8") -> Document:
    return the(rendered, "Deployment", name)["spec"]


def test_replicas_are_left_to_the_autoscaler():
    rendered = render_set("canary")
    assert "replicas" not in worker(rendered, "-worker-baseline")
    assert worker(rendered)["replicas"] == 2
    assert "replicas" not in the(rendered, "Deployment", "-gateway")["spec"]
    assert the(render(CPU), "Deployment", "-gateway")["spec"]["replicas"] == 1
    assert worker(render(changed(CPU, "variants.0.replicas", 0)))["replicas"] == 0


def test_gpus_are_a_limit_a_toleration_and_the_user_s_own_stay():
    values = changed(GPU, "variants.0.tolerations", [{"key": "own", "operator": "Exists"}])
    spec = worker(render(values), "-worker-w4a16")["template"]["spec"]
    assert spec["tolerations"] == [
        {"key": "own", "operator": "Exists"},
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
    ]
    assert spec["containers"][0]["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 1}
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert spec["runtimeClassName"] == "nvidia"
    assert "tolerations" not in worker(render(CPU))["template"]["spec"]


def test_digest_wins_over_tag_and_tag_over_the_chart_s_version():
    def image(**fields: str) -> str:
        values = changed(CPU, "image.worker", {"repository": "r/w", **fields})
        found: str = worker(render(values))["template"]["spec"]["containers"][0]["image"]
        return found

    digest = "sha256:" + "a" * 64
    assert image() == "r/w:0.1.0"
    assert image(tag="t") == "r/w:t"
    assert image(tag="t", digest=digest) == f"r/w@{digest}"


def test_volumes_of_a_worker():
    def volumes(values: Document, name: str = "-worker-w8a8") -> dict[str, Document]:
        spec = worker(render(values), name)["template"]["spec"]
        return {volume["name"]: volume for volume in spec["volumes"]}

    assert volumes(CPU)["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert volumes(CPU)["cache"]["emptyDir"] == {"sizeLimit": "10Gi"}
    assert volumes(CPU)["models"]["persistentVolumeClaim"] == {"claimName": "rel-taut-models"}
    gpu = volumes(GPU, "-worker-w4a16")
    assert gpu["shm"]["emptyDir"]["sizeLimit"] == "8Gi"
    assert gpu["cache"]["emptyDir"] == {"sizeLimit": "10Gi"}
    assert gpu["compile-cache"]["persistentVolumeClaim"] == {"claimName": "compile-cache"}


def test_root_of_a_worker_may_be_made_writable():
    (container,) = worker(render(changed(CPU, "worker.readOnlyRootFilesystem", False)))["template"][
        "spec"
    ]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is False


def test_worker_times_follow_from_each_other():
    values = changed(
        CPU, "worker", {"drainSeconds": 50, "deregisterSeconds": 7, "startupSeconds": 61}
    )
    spec = worker(render(values))["template"]["spec"]
    (container,) = spec["containers"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 61
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
    assert spec["terminationGracePeriodSeconds"] > 50 + 7
    at = container["args"].index("--shutdown-timeout")
    assert container["args"][at + 1] == "50"


def test_ranks_of_a_model_on_several_nodes():
    rendered = render_set("multi-node")
    group = the(rendered, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    leader, follower = (
        group[key]["spec"]["containers"][0] for key in ("leaderTemplate", "workerTemplate")
    )
    shared = ["--tensor-parallel-size=8", "--pipeline-parallel-size=2", "--nnodes", "2"]
    address = ["--master-addr", "$(LWS_LEADER_ADDRESS)", "--master-port", "29500"]
    assert leader["args"][leader["args"].index("--") + 1 :] == [
        *shared,
        "--node-rank",
        "0",
        *address,
    ]
    assert follower["args"][follower["args"].index("--") + 1 :] == [
        *shared,
        "--node-rank",
        "$(LWS_WORKER_INDEX)",
        *address,
        "--headless",
    ]
    assert "startupProbe" in leader and "startupProbe" not in follower
    assert "livenessProbe" in leader and "livenessProbe" not in follower
    selector = the(rendered, "Service", "-worker-fp8")["spec"]["selector"]
    assert selector.items() <= group["leaderTemplate"]["metadata"]["labels"].items()
    assert not selector.items() <= group["workerTemplate"]["metadata"]["labels"].items()


def test_tls_reaches_probes_monitor_and_smoke_test():
    rendered = render_set("one-gpu")
    gateway = the(rendered, "Deployment", "-gateway")["spec"]["template"]["spec"]["containers"][0]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert gateway[probe]["httpGet"]["scheme"] == "HTTPS"
    assert the(rendered, "ServiceMonitor", "-gateway")["spec"]["endpoints"][0]["scheme"] == "https"
    assert "scheme" not in the(rendered, "ServiceMonitor", "-worker")["spec"]["endpoints"][0]
    smoke = the(rendered, "Job", "-smoke")["spec"]["template"]["spec"]["containers"][0]
    assert smoke["args"][0] == "https://rel-taut-gateway.ns.svc.cluster.local:80"
    (volume,) = [
        v
        for v in the(rendered, "Job", "-smoke")["spec"]["template"]["spec"]["volumes"]
        if "secret" in v
    ]
    assert volume["secret"]["items"] == [{"key": "tls.crt", "path": "tls.crt"}]


def test_smoke_test_has_time_for_every_answer():
    def deadline(values: Document) -> int:
        seconds: int = the(render(values), "Job", "-smoke")["spec"]["activeDeadlineSeconds"]
        return seconds

    assert deadline(CANARY) == 4 * 120 + 60
    assert deadline(changed(CANARY, "smokeTest.pinVariants", False)) == 120 + 60


def test_rules_go_by_the_job_names_that_the_monitors_set():
    monitors = of_kind(render_set("one-gpu"), "ServiceMonitor")
    jobs = {
        rule["replacement"]
        for monitor in monitors
        for rule in monitor["spec"]["endpoints"][0]["relabelings"]
        if rule["targetLabel"] == "job"
    }
    assert jobs == {"taut-gateway", "taut-worker"}
    groups = [
        g for r in of_kind(render_set("one-gpu"), "PrometheusRule") for g in r["spec"]["groups"]
    ]
    expressions = " ".join(rule["expr"] for group in groups for rule in group["rules"])
    assert all(f'job="{job}"' in expressions for job in jobs)


def test_rules_of_the_cluster_are_about_this_release_and_link_the_published_manual():
    values = changed(CPU, "monitoring.prometheusRule", {"enabled": True})
    values["fullnameOverride"] = "llm-x"
    told = [g for r in of_kind(render(values), "PrometheusRule") for g in r["spec"]["groups"]]
    (cluster,) = [group for group in told if group["name"] == "taut-cluster"]
    assert all('=~"llm-x-.+"' in rule["expr"] for rule in cluster["rules"])
    assert all("runbook_url" not in rule.get("annotations", {}) for rule in cluster["rules"])
    values["monitoring"]["prometheusRule"]["runbookBase"] = "https://docs.example.com/operations"
    told = [g for r in of_kind(render(values), "PrometheusRule") for g in r["spec"]["groups"]]
    alerts = [rule for group in told for rule in group["rules"] if "alert" in rule]
    assert len(alerts) > 25
    for alert in alerts:
        place = f"https://docs.example.com/operations#{alert['alert'].lower()}"
        assert alert["annotations"]["runbook_url"] == place


def test_only_the_api_is_published():
    (rule,) = the(render_set("one-gpu"), "Ingress")["spec"]["rules"]
    assert [path["path"] for path in rule["http"]["paths"]] == ["/v1"]
    (route,) = the(render_set("canary"), "HTTPRoute")["spec"]["rules"]
    assert [match["path"]["value"] for match in route["matches"]] == ["/v1"]


PLACEHOLDERS = [
    ({}, "registry.invalid/taut/"),
    ({"gateway": {"repository": "mine.example/g"}}, "registry.invalid/taut/"),
    ({name: {"repository": "mine.example/x"} for name in ("gateway", "worker")}, "taut/toolbox"),
]


@pytest.mark.parametrize(("images", "named"), PLACEHOLDERS)
def test_names_that_nobody_owns_are_refused_and_say_what_to_set(images: Document, named: str):
    given = ("--set-json", f"image={json.dumps(images)}") if images else ()
    done = helm("template", "rel", str(CHART), *given)
    assert done.returncode != 0
    assert "global.imageRegistry: registry.invalid/taut/" in done.stderr
    assert named in done.stderr and "image.*.repository" in done.stderr


def test_one_registry_for_all_images_is_enough():
    done = helm("template", "rel", str(CHART), "--set", "global.imageRegistry=mine.example/team")
    assert done.returncode == 0, done.stderr
    ours = set(re.findall(r"image: (\S+/taut/\S+)", done.stdout))
    names = ("gateway", "worker-cpu", "toolbox")
    assert ours == {f"mine.example/team/taut/{name}:0.1.0" for name in names}


def test_notes_say_what_is_open():
    def notes(values: Document) -> str:
        done = helm(
            "install",
            "rel",
            str(CHART),
            "--dry-run=client",
            "--set=global.imageRegistry=registry.example",
            "--set-json",
            ",".join(f"{key}={json.dumps(value)}" for key, value in values.items()),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("NOTES:")[2]

    assert "Everyone who reaches the Service" in notes(CPU)
    assert "Network policies are off" not in notes(CPU)
    assert "Network policies are off" in notes(changed(CPU, "networkPolicy.enabled", False))
    assert "Everyone who reaches the Service" not in notes(GPU)
    assert "Upgrade with time for the validation" not in notes(CPU)
    assert "helm -n default upgrade --wait --timeout 3h rel" in notes(CANARY)
    assert "workers wait for it up to 1800 s" in notes(CANARY)
    assert "judges w8a8 against baseline in helm test only" in notes(set_values("air-gapped"))
