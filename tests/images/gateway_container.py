"""A gateway in a hardened container, in front of a mock worker on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from container_engine import Container, engine, wait_for
from http_calls import call
from mock_worker import Faults, MockEngine, mock_worker

from taut_deploy.ports import free_port

HARDENED = (
    *("--read-only", "--tmpfs", "/tmp", "--cap-drop", "all", "--memory", "256m"),
    *("--security-opt", "no-new-privileges", "--pids-limit", "64", "--network", "host"),
)


@dataclass(frozen=True)
class Gateway:
    """A gateway in a container, in front of a mock worker on the host."""

    container: Container
    port: int
    worker: MockEngine

    def readiness(self) -> int:
        return call(self.port, "GET", "/health/ready")[0]


@contextmanager
def gateway(
    image: str, folder: Path, faults: Faults | None = None, ready_within_s: float = 60
) -> Iterator[Gateway]:
    """Run a gateway of an image until it is ready; its file goes into ``folder``."""
    port = free_port()
    with mock_worker(faults or Faults()) as worker:
        model = {
            "name": "m",
            "max_model_len": 64,
            "golden": {"prompt": "The capital of France is", "expected_text": " Paris"},
            "workers": [{"name": "w0", "url": worker.url}],
        }
        path = folder / "gateway.yaml"
        listen = {"host": "127.0.0.1", "port": port}
        path.write_text(yaml.safe_dump({"listen": listen, "models": [model]}))
        path.chmod(0o644)
        mount = ("-v", f"{path}:/etc/taut/gateway.yaml:ro", "-e", f"TAUT_GATEWAY_PORT={port}")
        with engine().container(image, options=(*HARDENED, *mount)) as container:
            running = Gateway(container, port, worker)
            wait_for(lambda: running.readiness() == 200, ready_within_s, container.logs)
            yield running
