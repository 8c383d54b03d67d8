"""The volume for compiled code: who fills it, who waits for it, and what makes it another one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from chart_rendering import (
    Document,
    changed,
    needs_helm,
    of_kind,
    render,
    render_set,
    set_values,
    the,
)

pytestmark = needs_helm
CPU = set_values("cpu-minimal")
GPU = set_values("one-gpu")
KEPT = changed(CPU, "worker", {"cache": {"size": "20Gi"}})
WARMED = changed(KEPT, "worker.cache.warm", {"enabled": True})


def worker(values: Document, name: str = "-worker-w8a8") -> Document:
    spec: Document = the(render(values), "Deployment", name)["spec"]["template"]["spec"]
    return spec


def warm_job(values: Document) -> Document:
    (job,) = [d for d in of_kind(render(values), "Job") if "-warm-" in d["metadata"]["name"]]
    return job


def mounts(container: Document) -> dict[str, bool]:
    return {m["name"]: m.get("readOnly", False) for m in container["volumeMounts"]}


def env(container: Document) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


def test_without_a_claim_each_worker_compiles_for_itself():
    (container,) = worker(CPU)["containers"]
    assert "compile-cache" not in mounts(container)
    assert "TAUT_COMPILE_CACHE" not in env(container)
    assert [d["metadata"]["name"] for d in of_kind(render(CPU), "PersistentVolumeClaim")] == [
        "rel-taut-models"
    ]


def test_claim_is_made_or_the_user_s_own_is_used():
    made = the(render(KEPT), "PersistentVolumeClaim", "compile-cache")
    assert made["spec"]["resources"]["requests"] == {"storage": "20Gi"}
    assert made["spec"]["accessModes"] == ["ReadWriteOnce"]
    own = changed(CPU, "worker", {"cache": {"existingClaim": "mine"}})
    assert len(of_kind(render(own), "PersistentVolumeClaim")) == 1
    volumes = {volume["name"]: volume for volume in worker(own)["volumes"]}
    assert volumes["compile-cache"]["persistentVolumeClaim"] == {"claimName": "mine"}


def test_workers_write_to_it_until_a_job_does():
    (container,) = worker(KEPT)["containers"]
    assert mounts(container)["compile-cache"] is False
    assert env(container)["TAUT_COMPILE_CACHE"] == "/compile-cache"
    (reader,) = worker(WARMED)["containers"]
    assert mounts(reader)["compile-cache"] is True
    (writer,) = warm_job(WARMED)["spec"]["template"]["spec"]["initContainers"]
    assert mounts(writer)["compile-cache"] is False


def test_job_runs_the_worker_as_it_will_run():
    values = changed(GPU, "worker.cache.warm", {"enabled": True})
    serves = worker(values, "-worker-w4a16")
    warms = warm_job(values)["spec"]["template"]["spec"]
    (container,) = serves["containers"]
    warm = warms["initContainers"][-1]
    assert warm["image"] == container["image"]
    assert env(warm) == env(container)
    assert warm["resources"] == container["resources"]
    for key in ("nodeSelector", "tolerations", "affinity", "runtimeClassName"):
        assert warms[key] == serves[key], key
    assert warm["args"][:5] == [
        "cache",
        "warm",
        "/models/checkpoints/w4a16",
        "--cache",
        "/compile-cache",
    ]
    own = ("--name", "--host", "--port", "--shutdown-timeout")
    shared = list(container["args"][2:])
    for flag in own:
        at = shared.index(flag)
        del shared[at : at + 2]
    assert warm["args"][-len(shared) :] == shared
    assert not set(own) & set(warm["args"])


def key_of(values: Document, name: str = "-worker-w8a8") -> str:
    wait = worker(values, name)["initContainers"][-1]
    assert wait["name"] == "wait-for-cache"
    says = warm_job(values)["spec"]["template"]["spec"]["containers"][0]
    assert wait["args"][0] == "/".join(says["args"])
    key: str = says["args"][1]
    return key


@pytest.mark.parametrize(
    ("path", "value", "is_another"),
    [
        ("image.worker.tag", "0.2.0", True),
        ("model.maxModelLen", 1024, True),
        ("variants.0.vllmArgs", ["--enforce-eager"], True),
        ("variants.0.kernels", "off", True),
        ("variants.0.env", {"VLLM_CPU_OMP_THREADS_BIND": "0"}, True),
        ("variants.0.checkpoint", "checkpoints/next", True),
        ("variants.0.nodeSelector", {"gpu": "other"}, True),
        ("worker.drainSeconds", 5, False),
        ("gateway.replicas", 3, False),
        ("podLabels", {"team": "x"}, False),
        ("worker.cache.warm.waitSeconds", 5, False),
    ],
)
def test_what_compiled_code_depends_on_makes_another_key(
    path: str, value: object, is_another: bool
):
    assert (key_of(changed(WARMED, path, value)) != key_of(WARMED)) is is_another


def test_groups_of_nodes_compile_for_themselves():
    values = changed(set_values("multi-node"), "worker.cache", {"size": "20Gi"})
    rendered = render(changed(values, "worker.cache.warm", {"enabled": True}))
    assert not of_kind(rendered, "Job") or all(
        "-warm-" not in job["metadata"]["name"] for job in of_kind(rendered, "Job")
    )
    group = the(rendered, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    assert "initContainers" not in group["leaderTemplate"]["spec"]


def test_job_reaches_nobody():
    policy = the(render(WARMED), "NetworkPolicy", "-warm")["spec"]
    assert policy["ingress"] == [] and policy["egress"] == []
    labels = warm_job(WARMED)["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    service = the(render(WARMED), "Service", "-worker-w8a8")["spec"]["selector"]
    assert not service.items() <= labels.items()
    assert "-warm" not in [d["metadata"]["name"] for d in of_kind(render_set("canary"), "Job")]


def run_wait(folder: Path, key: str, seconds: str) -> subprocess.CompletedProcess[str]:
    """Run what the worker's init container runs, with the volume at ``folder``."""
    command = worker(WARMED)["initContainers"][-1]["command"]
    return subprocess.run(
        [*command, str(folder / "warmed" / key), seconds],
        capture_output=True,
        text=True,
        timeout=30,
        env={"PATH": os.environ["PATH"]},
    )


def test_worker_waits_for_what_the_job_says_and_not_for_ever(tmp_path: Path):
    says = warm_job(WARMED)["spec"]["template"]["spec"]["containers"][0]
    late = run_wait(tmp_path, "k", "1")
    assert (late.returncode, late.stdout) == (0, "no warm cache after 1 s: starting cold\n")
    subprocess.run([*says["command"], tmp_path / "warmed", "k"], check=True)
    there = run_wait(tmp_path, "k", "600")
    assert (there.returncode, there.stdout) == (0, "")
