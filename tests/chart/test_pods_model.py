"""The whole of the chart in containers: a real worker, the gateway, the smoke and validation Jobs.

One worker serves SmolLM2-135M's first blocks in W8A8 on a CPU. It answers to the baseline's name,
too: two vLLM processes do not fit into the time; the compose tests run two.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_rendering import Document, changed, needs_helm, of_kind, render, set_values, the

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "images"))

from built_images import image, model_home
from container_engine import engine, wait_for
from podman_pods import Node, Pod, node

from taut_deploy.checkpoint import Golden, read_manifest

pytestmark = [needs_helm, pytest.mark.timeout(3600)]  # the first test may build the images
MODEL = "smollm2-135m-instruct"
NEW_POLICY = "/models/policies/{}.yaml"
POLICIES: dict[str, Document] = {
    # Wide enough for a handful of sequences, so that the verdict is about the Job alone.
    "wide": {
        "require": {"perplexity_ratio": {"max": 3}, "mean_kl": {"max": 2}},
        "latency": {"required": False, "ttft_p50_ratio_at_most": 1000, "error_rate_at_most": 0.5},
    },
    "impossible": {"require": {"perplexity_ratio": {"max": 0.5}}},
}
SMALL = {
    "latency": {"requests": 32, "concurrency": [1], "promptTokens": 16, "outputTokens": 2},
    "sequences": 8,  # the interval of a mean over four is anything: up to 20 nats on one machine
    "sequenceLength": 48,
}


def known() -> Golden:
    """What the checkpoint answers, as its manifest says."""
    golden = read_manifest(model_home() / "checkpoints" / "w8a8").golden
    assert golden is not None
    return golden


def values() -> Document:
    """The smallest set, with a baseline and the validation Job; Services have the pods' port."""
    found = changed(set_values("cpu-minimal"), "gateway.service", {"port": 8000})
    golden = {"prompt": known().prompt, "expected_text": known().expected_text}
    found = changed(found, "model.gateway.golden", golden)
    found = changed(found, "model.maxModelLen", 256)
    # Compiling takes minutes and is vLLM's alone; the end-to-end tests do it.
    found["variants"][0]["vllmArgs"] = ["--enforce-eager"]
    found["variants"].append(
        {"name": "baseline", "checkpoint": f"models/{MODEL}", "weight": 0}
        | {"resources": found["variants"][0]["resources"]}
    )
    found["validation"] = {
        "enabled": True,
        "baseline": "baseline",
        "candidate": "w8a8",
        "policy": NEW_POLICY.format("wide"),
        "text": {"configMap": "validation-text"},
        **SMALL,
    }
    return found


def rendered() -> list[Document]:
    return render(values())


@dataclass
class Cluster:
    node: Node
    gateway: Pod
    worker: Pod


def service(name: str) -> str:
    return f"rel-taut-{name}.ns.svc.cluster.local"


def store(folder: Path) -> Path:
    """A model store that uid 10001 may write to: the verdict goes into a manifest."""
    home = folder / "models"
    shutil.copytree(model_home(), home, copy_function=os.link)
    (home / "policies").mkdir()
    for name, policy in POLICIES.items():
        about = {"name": name, "description": "For this test.", **policy}
        (home / "policies" / f"{name}.yaml").write_text(yaml.safe_dump(about))
    for path in (home, *home.rglob("*")):
        os.chown(path, 10001, 10001)
    return home


def judged_text() -> Document:
    """Prose that nothing was calibrated on."""
    text = (Path(__file__).resolve().parents[2] / "LICENSE").read_text()
    metadata = {"name": "validation-text"}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {"text.txt": text},
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    here = engine()
    for name in ("gateway", "worker-cpu", "toolbox"):
        image(name)
    folder = tmp_path_factory.mktemp("pods")
    with node(here, folder) as network:
        network.claims = {"rel-taut-models": store(folder)}
        network.config_maps = [*of_kind(rendered(), "ConfigMap"), judged_text()]
        worker = network.play(
            the(rendered(), "Deployment", "-worker-w8a8"),
            "worker",
            (service("worker-w8a8"), service("worker-baseline")),
        )
        gateway = network.play(
            the(rendered(), "Deployment", "-gateway"), "gateway", (service("gateway"),)
        )
        yield Cluster(network, gateway, worker)


def startup_probe(pod: Pod) -> tuple[int, str]:
    (container,) = the(rendered(), "Deployment", "-worker-w8a8")["spec"]["template"]["spec"][
        "containers"
    ]
    return pod.exec("worker", *container["startupProbe"]["exec"]["command"])


def ask(pod: Pod, **fields: object) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection(pod.address, 8000, timeout=120)) as connection:
        known_prompt = {"model": MODEL, "prompt": known().prompt}
        body = {**known_prompt, "max_tokens": 4, "temperature": 0, **fields}
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def is_ready(gateway: Pod) -> bool:
    return gateway.exec("gateway", "taut-healthcheck", "ready")[0] == 0


def test_worker_starts_with_one_correct_token(cluster: Cluster):
    def alive() -> bool:
        assert not cluster.worker.restarts("worker"), cluster.worker.logs("worker")[-3000:]
        return startup_probe(cluster.worker)[0] == 0

    wait_for(alive, 1200, lambda: cluster.worker.logs("worker"))
    script, directory = "/etc/taut/scripts/startup_probe.py", "/models/checkpoints/w8a8"
    wrong = (MODEL, directory, known().prompt, " Rome")
    other = cluster.worker.exec("worker", "python3", script, *wrong)
    assert other == (1, f"answered {known().expected_text!r} instead of ' Rome'\n")
    assert cluster.worker.exec("worker", "id", "-u") == (0, "10001\n")
    assert cluster.worker.exec("worker", "touch", "/x")[0] == 1


def test_completion_through_the_gateway(cluster: Cluster):
    wait_for(lambda: is_ready(cluster.gateway), 300, lambda: cluster.gateway.logs("gateway"))
    status, answer = ask(cluster.gateway)
    assert status == 200, answer
    assert answer["choices"][0]["text"].startswith(known().expected_text)
    assert answer["usage"]["completion_tokens"] == 4


def test_smoke_job_ends_with_0(cluster: Cluster):
    wait_for(lambda: is_ready(cluster.gateway), 300, lambda: cluster.gateway.logs("gateway"))
    job = cluster.node.play(the(rendered(), "Job", "-smoke"), "smoke")
    assert job.wait("smoke", 120) == 0, job.logs("smoke")
    assert job.logs("smoke") == "any variant: ok\nw8a8: ok\nbaseline: ok\n"


def test_validation_job_ends_with_the_code_of_its_verdict(cluster: Cluster):
    wait_for(lambda: is_ready(cluster.gateway), 300, lambda: cluster.gateway.logs("gateway"))
    job = cluster.node.play(the(rendered(), "Job", "-validation"), "passes")
    assert job.state("files")["ExitCode"] == 0, job.problem + job.logs("files")
    assert job.wait("servers", 600) == 0, job.logs("servers")
    assert "PASS" in job.logs("servers")
    manifest = cluster.node.claims["rel-taut-models"] / "checkpoints" / "w8a8" / "taut.json"
    verdict = json.loads(manifest.read_text())["validation"]
    assert (verdict["verdict"], verdict["policy"]) == ("PASS", NEW_POLICY.format("wide"))


def test_validation_job_fails_before_servers_are_asked(cluster: Cluster):
    policy = NEW_POLICY.format("impossible")
    job = the(render(changed(values(), "validation.policy", policy)), "Job", "-validation")
    played = cluster.node.play(job, "fails")
    assert played.state("files")["ExitCode"] == 1, played.logs("files")
    assert played.state("servers")["Status"] == "created"


def test_stopped_worker_ends_within_its_grace(cluster: Cluster):
    spec = the(rendered(), "Deployment", "-worker-w8a8")["spec"]["template"]["spec"]
    code = cluster.worker.stop("worker", spec["terminationGracePeriodSeconds"])
    assert code in (0, 143), cluster.worker.logs("worker")[-3000:]
