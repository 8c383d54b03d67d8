"""A worker starts by one correct token: what the probe asks, and what it makes of the answer."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chart_rendering import Document, changed, needs_helm, render, render_set, set_values, the
from generate import CHART

CPU = set_values("cpu-minimal")
SCRIPT = CHART / "files" / "startup_probe.py"


def probe(values: Document, name: str = "-worker-w8a8") -> Document:
    (container,) = the(render(values), "Deployment", name)["spec"]["template"]["spec"]["containers"]
    found: Document = container["startupProbe"]
    return found


ASKS = ["python3", "/etc/taut/scripts/startup_probe.py", "smollm2-135m-instruct"]


@needs_helm
def test_startup_probe_asks_the_variant_s_golden_prompt_then_the_model_s_then_the_checkpoint_s():
    golden = {"prompt": "One, two,", "expected_text": " three"}
    of_variant = probe(changed(CPU, "variants.0.gateway", {"golden": golden}))
    directory = "/models/checkpoints/w8a8"
    assert of_variant["exec"]["command"] == [*ASKS, directory, "One, two,", " three"]
    of_model = probe(CPU)
    assert of_model["exec"]["command"] == [*ASKS, directory, "The capital of France is", " Paris"]
    of_checkpoint = probe(changed(CPU, "model.gateway", {}))
    assert of_checkpoint["exec"]["command"] == [*ASKS, directory]


@needs_helm
def test_startup_may_go_by_health_alone():
    rendered = render(changed(CPU, "worker", {"startup": "health"}))
    pod = the(rendered, "Deployment", "-worker-w8a8")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["startupProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert "exec" not in container["startupProbe"]
    assert "scripts" not in [volume["name"] for volume in pod["volumes"]]


@needs_helm
def test_only_the_first_node_of_a_group_is_asked():
    group = the(render_set("multi-node"), "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    leader, follower = (group[key]["spec"] for key in ("leaderTemplate", "workerTemplate"))
    assert "exec" in leader["containers"][0]["startupProbe"]
    assert "startupProbe" not in follower["containers"][0]
    names = [{volume["name"] for volume in spec["volumes"]} for spec in (leader, follower)]
    assert names[0] - names[1] == {"scripts"}


class Answers(http.server.BaseHTTPRequestHandler):
    """A worker that has one answer to everything."""

    status = 200
    body = b""
    asked: list[Document]

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Stay silent."""


@contextmanager
def worker(text: str | None, status: int = 200) -> Iterator[tuple[int, list[Document]]]:
    body = json.dumps({"choices": [{"text": text}]} if text is not None else {"error": "loading"})
    asked: list[Document] = []
    fields = {"asked": asked, "body": body.encode(), "status": status}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("H", (Answers,), fields)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port, asked
        finally:
            server.shutdown()
            thread.join()


def ask(port: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the script as the probe does, but for the port."""
    run = "import sys; sys.path[:0] = [sys.argv[1]]; import startup_probe; "
    run += "startup_probe.PORT = int(sys.argv[2]); sys.exit(startup_probe.main(*sys.argv[3:]))"
    command = [sys.executable, "-c", run, SCRIPT.parent, port, *arguments]
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "POD_IP": "127.0.0.1"},
    )


def manifest(folder: Path) -> Path:
    golden = {"prompt": "Two and two is", "expected_text": " four", "token": 4, "margin": 3.0}
    (folder / "taut.json").write_text(json.dumps({"golden": golden}))
    return folder


def test_right_token_passes_and_the_request_is_greedy(tmp_path: Path):
    with worker(" Paris") as (port, asked):
        done = ask(port, "m", tmp_path, "The capital of France is", " Paris")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    prompt = "The capital of France is"
    assert asked == [{"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0}]


def test_manifest_s_golden_prompt_is_asked(tmp_path: Path):
    with worker(" four") as (port, asked):
        assert ask(port, "m", manifest(tmp_path)).returncode == 0
    assert asked[0]["prompt"] == "Two and two is"
    with worker(" five") as (port, _):
        done = ask(port, "m", tmp_path)
    assert (done.returncode, done.stderr) == (1, "answered ' five' instead of ' four'\n")


def test_model_without_a_manifest_may_answer_anything_but_nothing(tmp_path: Path):
    with worker(" whatever") as (port, _):
        assert ask(port, "m", tmp_path).returncode == 0
    with worker("") as (port, _):
        done = ask(port, "m", tmp_path)
    assert (done.returncode, done.stderr) == (1, "answered '' instead of a token\n")


def test_manifest_that_names_no_golden_prompt_fails(tmp_path: Path):
    (tmp_path / "taut.json").write_text("{}")
    with worker(" x") as (port, asked):
        done = ask(port, "m", tmp_path)
    assert done.returncode == 1 and "KeyError" in done.stderr and asked == []


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [(None, 503, "status 503"), (None, 200, "KeyError")],
)
def test_answer_that_is_no_completion_fails(text: None, status: int, says: str, tmp_path: Path):
    with worker(text, status) as (port, _):
        done = ask(port, "m", tmp_path)
    assert done.returncode == 1 and says in done.stderr


def test_worker_that_does_not_listen_yet_fails_at_once(tmp_path: Path):
    done = ask(1, "m", tmp_path)
    assert done.returncode == 1 and "ConnectionRefusedError" in done.stderr
