"""The rendered gateway, run as its pod would run it: file, smoke test, stop hook."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
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
    reload: dict[str, Any]
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
    pod = the(rendered, "Deployment", "-gateway")["spec"]["template"]["spec"]
    container, reload = pod["containers"]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Worker) as worker:
        threading.Thread(target=worker.serve_forever, daemon=True).start()
        config = gateway_config(rendered)
        config["listen"] = {"host": "127.0.0.1", "port": free_port()}
        config["admin"]["port"] = free_port()
        for variant in config["models"][0]["variants"]:
            variant["discover"]["dns"] |= {"host": "localhost", "port": worker.server_port}
        path = folder / "gateway.yaml"
        path.write_text(yaml.safe_dump(config))
        (folder / "fixed").write_text(reload["command"][-1])
        env = {entry["name"]: entry["value"] for entry in container["env"]}
        env["TAUT_GATEWAY_PORT"] = str(config["listen"]["port"])
        env["TAUT_ADMIN_PORT"] = str(config["admin"]["port"])
        command = [BIN / executable(container), container["args"][0], path]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **env})
        try:
            yield Played(process, container, reload, config["listen"]["port"], env)
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


def weights(gateway: Played) -> dict[str, float]:
    """What the gateway has in force."""
    url = f"http://127.0.0.1:{gateway.env['TAUT_ADMIN_PORT']}/admin/state"
    with urllib.request.urlopen(url, timeout=5) as answer:
        (model,) = json.load(answer)["models"].values()
    return {name: variant["weight"] for name, variant in model["variants"].items()}


def reloads_refused(gateway: Played) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{gateway.port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    counted = [x for x in lines if x.startswith("taut_reloads_total") and "refused" in x]
    assert counted
    return sum(int(float(line.split()[-1])) for line in counted)


@pytest.mark.timeout(120)
def test_running_gateway_takes_over_other_weights_and_leaves_what_is_for_the_next_pods(
    tmp_path: Path,
):
    with played(tmp_path) as gateway:
        until_ready(gateway)
        program, script, folder, fixed = gateway.reload["command"]
        assert (program, folder) == ("python3", "/etc/taut/config")
        script = CHART / "files" / Path(script).name
        env = {**os.environ, **gateway.env}
        beside = subprocess.Popen([sys.executable, script, tmp_path, fixed], env=env)
        try:
            path = tmp_path / "gateway.yaml"
            config = yaml.safe_load(path.read_text())
            config["models"][0]["variants"][0]["weight"] = 7
            path.write_text(yaml.safe_dump(config))
            deadline = time.monotonic() + 20
            while weights(gateway) != {"w8a8": 7, "w4a16": 1}:
                assert time.monotonic() < deadline
                time.sleep(0.2)
            # Another drain time is for pods to come: nothing is asked of this gateway.
            (tmp_path / "fixed").write_text("of other pods")
            path.write_text(yaml.safe_dump({**config, "drain_timeout_s": 5}))
            time.sleep(5)
            assert reloads_refused(gateway) == 0
            assert beside.poll() is None
        finally:
            beside.terminate()
        assert beside.wait(10) == 0
