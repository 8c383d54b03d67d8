"""The rendered gateway, run as its pod would run it: file, smoke test, stop hook."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_rendering import (
    changed,
    executable,
    gateway_config,
    needs_helm,
    render,
    set_values,
    the,
)
from generate import CHART

from taut_deploy.ports import free_port

pytestmark = needs_helm
BIN = Path(sys.executable).parent
TWO = changed(
    set_values("cpu-minimal"),
    "variants",
    [{"name": name, "checkpoint": f"checkpoints/{name}"} for name in ("w8a8", "w4a16")],
)


class Worker(http.server.BaseHTTPRequestHandler):
    """As much of a vLLM worker as a golden prompt and a completion need."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/health" else 404, b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.answer(200, json.dumps({"choices": [{"text": " Paris", "index": 0}]}).encode())

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Stay silent."""


@dataclass
class Played:
    """A running gateway, with what its container would have."""

    process: subprocess.Popen[bytes]
    container: dict[str, Any]
    port: int
    env: dict[str, str]

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **self.env},
        )


@contextmanager
def played(folder: Path) -> Iterator[Played]:
    """The gateway of the chart; only addresses differ, since there is no cluster here."""
    rendered = render(TWO)
    (container,) = the(rendered, "Deployment", "-gateway")["spec"]["template"]["spec"]["containers"]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Worker) as worker:
        threading.Thread(target=worker.serve_forever, daemon=True).start()
        config = gateway_config(rendered)
        config["listen"] = {"host": "127.0.0.1", "port": free_port()}
        config["admin"]["port"] = free_port()
        for variant in config["models"][0]["variants"]:
            variant["discover"]["dns"] |= {"host": "localhost", "port": worker.server_port}
        path = folder / "gateway.yaml"
        path.write_text(yaml.safe_dump(config))
        env = {entry["name"]: entry["value"] for entry in container["env"]}
        env["TAUT_GATEWAY_PORT"] = str(config["listen"]["port"])
        env["TAUT_ADMIN_PORT"] = str(config["admin"]["port"])
        command = [BIN / executable(container), container["args"][0], path]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **env})
        try:
            yield Played(process, container, config["listen"]["port"], env)
        finally:
            process.kill()
            process.wait()
            worker.shutdown()


def until_ready(gateway: Played) -> None:
    deadline = time.monotonic() + 30
    while gateway.run(BIN / "taut-healthcheck", "ready").returncode:
        assert gateway.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.timeout(120)
def test_gateway_of_the_chart_serves_and_drains(tmp_path: Path):
    with played(tmp_path) as gateway:
        until_ready(gateway)
        url = f"http://127.0.0.1:{gateway.port}"
        model = "smollm2-135m-instruct"
        smoke = CHART / "files" / "smoke.py"
        done = gateway.run(sys.executable, smoke, url, model, 20, "w8a8", "w4a16")
        assert (done.returncode, done.stdout) == (0, "any variant: ok\nw8a8: ok\nw4a16: ok\n")

        hook = gateway.container["lifecycle"]["preStop"]["exec"]["command"]
        hook[hook.index("--accept") + 1] = "0"
        stopped = gateway.run(BIN / hook[0], *hook[1:])
        assert stopped.returncode == 0, stopped.stderr
        refused = gateway.run(sys.executable, smoke, url, model, 20)
        assert "status 503" in refused.stdout
        gateway.process.terminate()
        assert gateway.process.wait(20) == 0
