"""A running ``taut serve`` as the end-to-end tests see it, and how they talk to it."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

MODEL = "smollm2-135m-instruct"


@dataclass
class Served:
    """A running ``taut serve`` and where to find its parts."""

    process: subprocess.Popen[bytes]
    home: Path
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def configuration(self) -> dict:
        return yaml.safe_load((self.home / "run" / str(self.port) / "gateway.yaml").read_text())

    @property
    def worker_url(self) -> str:
        return self.configuration["models"][0]["workers"][0]["url"]

    @property
    def checkpoint(self) -> Path:
        (only,) = (
            path for path in (self.home / "checkpoints").iterdir() if not path.name.startswith(".")
        )
        return only

    def output(self) -> str:
        return self.log.read_text()

    def readiness(self) -> int:
        return status_of(f"{self.url}/health/ready")

    def wait_ready(self, timeout_s: float) -> None:
        wait_for(
            lambda: self.readiness() == 200, timeout_s, lambda: self.output()[-2000:], self.process
        )


def run_taut(
    *words: str | Path, timeout_s: float, home: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a ``taut`` command on files alone, it asks no hub; ``home`` is another TAUT_HOME."""
    homes = {} if home is None else {"TAUT_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-m", "taut_deploy", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", **homes},
    )


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def wait_for(condition, timeout_s, explain=lambda: "", process=None) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if process is not None and process.poll() is not None:
            pytest.fail(f"the process ended with {process.returncode}: {explain()}")
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s} s: {explain()}")
        time.sleep(0.2)


def post(url: str, body: dict, timeout_s: float = 120) -> tuple[int, dict]:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
