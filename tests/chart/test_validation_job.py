"""The validation Job: what it compares, in which order, with which text, and what it may write."""

from __future__ import annotations

import pytest
from chart_rendering import Document, changed, needs_helm, render, render_set, set_values, the

pytestmark = needs_helm
CANARY = set_values("canary")
URL = "http://rel-taut-worker-{}.ns.svc.cluster.local:8000"
SERVERS = changed(
    changed(CANARY, "validation.through", "servers"), "validation.acceptLowerBound", True
)


def job(values: Document) -> Document:
    found: Document = the(render(values), "Job", "-validation")
    return found


def pod(values: Document) -> Document:
    spec: Document = job(values)["spec"]["template"]["spec"]
    return spec


def store(container: Document) -> list[bool]:
    """Whether the model store is mounted read-only; nothing where it is not mounted."""
    return [m["readOnly"] for m in container["volumeMounts"] if m["name"] == "models"]


def test_hook_runs_after_an_upgrade_or_in_helm_test_only():
    assert job(CANARY)["metadata"]["annotations"]["helm.sh/hook"] == "post-upgrade,test"
    files = the(render_set("air-gapped"), "Job", "-validation")
    assert files["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert job(CANARY)["spec"]["backoffLimit"] == files["spec"]["backoffLimit"] == 0


def test_by_default_what_is_stored_is_judged_exactly_and_then_what_is_served():
    spec = pod(CANARY)
    files, wait = spec["initContainers"]
    (servers,) = spec["containers"]
    assert [files["name"], wait["name"], servers["name"]] == [
        "files",
        "wait-for-workers",
        "servers",
    ]
    assert "--baseline=/models/models/smollm2-135m-instruct" in files["args"]
    assert "--candidate=/models/checkpoints/w8a8" in files["args"]
    assert "--accept-lower-bound" not in files["args"]
    assert wait["args"] == ["1800", URL.format("baseline"), URL.format("w8a8")]
    assert f"--baseline={URL.format('baseline')}" in servers["args"]
    assert f"--candidate={URL.format('w8a8')}" in servers["args"]
    # The divergence that servers cannot show was judged before.
    assert "--accept-lower-bound" in servers["args"]
    assert "--output=/reports/files" in files["args"]
    assert "--output=/reports/servers" in servers["args"]


def test_manifest_is_written_where_files_are_compared_and_nowhere_else():
    spec = pod(CANARY)
    assert store(spec["initContainers"][0]) == [False]
    assert store(spec["containers"][0]) == []
    assert store(pod(SERVERS)["containers"][0]) == []
    text = {"configMap": "", "path": "texts/judge.txt"}
    stored = pod(changed(SERVERS, "validation.text", text))["containers"][0]
    assert store(stored) == [True]
    assert "--text=/models/texts/judge.txt" in stored["args"]
    policy = pod(changed(SERVERS, "validation.policy", "/models/policies/own.yaml"))
    assert store(policy["containers"][0]) == [True]


def test_through_one_of_the_two():
    servers = pod(SERVERS)
    assert [each["name"] for each in servers["initContainers"]] == ["wait-for-workers"]
    assert [each["name"] for each in servers["containers"]] == ["servers"]
    files = pod(changed(CANARY, "validation.through", "files"))
    assert "initContainers" not in files
    assert [each["name"] for each in files["containers"]] == ["files"]


def test_lower_bound_of_servers_alone_passes_only_if_the_user_says_so():
    own = changed(SERVERS, "validation.policy", "/models/policies/own.yaml")
    assert "--accept-lower-bound" in pod(own)["containers"][0]["args"]
    own = changed(own, "validation.acceptLowerBound", False)
    assert "--accept-lower-bound" not in pod(own)["containers"][0]["args"]


def test_latency_is_asked_of_servers():
    latency = {"requests": 40, "concurrency": [1, 4], "promptTokens": 32, "outputTokens": 8}
    spec = pod(changed(CANARY, "validation.latency", latency))
    arguments = spec["containers"][0]["args"]
    assert "--latency" in arguments and "--latency-concurrency=1,4" in arguments
    assert {
        "--latency-requests=40",
        "--latency-prompt-tokens=32",
        "--latency-output-tokens=8",
    } <= set(arguments)
    assert not any("latency" in each for each in spec["initContainers"][0]["args"])
    off = pod(changed(CANARY, "validation.latency.enabled", False))["containers"][0]["args"]
    assert [each for each in off if "latency" in each] == ["--no-latency"]


@pytest.mark.parametrize("through", ["files", "both"])
def test_gpus_are_for_the_comparison_of_files(through: str):
    values = changed(changed(CANARY, "validation.through", through), "validation.gpus", 1)
    spec = pod(changed(values, "validation.device", "cuda"))
    limits = {
        each["name"]: each["resources"]["limits"].get("nvidia.com/gpu")
        for each in [*spec.get("initContainers", []), *spec["containers"]]
    }
    assert limits["files"] == 1
    assert limits.get("servers") is None
    assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
