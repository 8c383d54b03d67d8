"""Gateways and workers as real processes, for the fault and fuzz tests.

Nothing of taut_service is imported here, a gateway is what
``python -m taut_service --config FILE`` starts and ``/metrics`` shows. Workers are mock engines
(``taut_deploy.bench.mock_engine``), one process each, so that they can be killed.
``TAUT_FAULT_SCALE`` (0 to 1, default 0.1) scales the long loops; 1 is the full count of the issue.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import patience
import psutil
import yaml
from patience import HANGS_S
from raw_client import HOST, MODEL

from taut_deploy.ports import free_port

SCALE = float(os.environ.get("TAUT_FAULT_SCALE", "0.1"))
QUICK = {"connect_s": 5, "first_byte_s": 10, "idle_s": 10, "total_s": 60}
"""A machine that stands still for seconds ends no request; tests of deadlines have shorter ones."""
COUNTS: list[str] = []
"""Lines for the end of the test run: how many cases a bounded test had."""


def scaled(full: int, least: int = 1) -> int:
    """Return how many of the full count to run."""
    return max(least, round(full * SCALE))


def report(line: str) -> None:
    """Have a line printed at the end of the run."""
    COUNTS.append(line)


def call(
    port: int, method: str, path: str, body: bytes | None = None, timeout_s: float = HANGS_S
) -> tuple[int, bytes]:
    """One request on a connection of its own, synchronously."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        headers = {"content-type": "application/json"} if body is not None else {}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


class Process:
    """A process with a log, ended in the end whatever happens."""

    def __init__(self, argv: list[str], log: Path) -> None:
        self.argv = argv
        self.log = log
        self._started: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as sink:
            self._started = subprocess.Popen(
                [sys.executable, *self.argv],
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONSAFEPATH": "1"},
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._started is not None, "not started"
        return self._started

    @property
    def running(self) -> bool:
        return self._started is not None and self._started.poll() is None

    def rss_mb(self) -> float:
        rss: int = psutil.Process(self.process.pid).memory_info().rss
        return rss / 1e6

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def wait(self, timeout_s: float = HANGS_S) -> int:
        """Wait for the end; return the exit code."""
        await eventually(lambda: not self.running, timeout_s)
        return int(self.process.returncode)

    async def kill(self) -> None:
        """SIGKILL."""
        if self.running:
            self.signal(signal.SIGKILL)
            await self.wait()

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Engine(Process):
    """A worker."""

    def __init__(self, log: Path, settings: dict[str, Any], strict: bool = True) -> None:
        self.port = free_port()
        argv = ["-m", "taut_deploy.bench.mock_engine", "--port", str(self.port)]
        argv += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        super().__init__(argv + (["--strict"] if strict else []), log)

    async def start_and_wait(self) -> None:
        self.start()
        await eventually(lambda: opens(self.port))

    def behave(self, **changes: Any) -> None:
        status, text = call(self.port, "POST", "/mock/behaviour", json.dumps(changes).encode())
        assert status == 200, text

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(call(self.port, "GET", "/mock/state")[1])
        return found


class Gateway(Process):
    """A gateway."""

    def __init__(self, folder: Path, name: str, settings: dict[str, Any]) -> None:
        self.port = free_port()
        self.file = folder / f"{name}.yaml"
        self.file.write_text(yaml.safe_dump({**settings, "listen": {"port": self.port}}))
        argv = ["-m", "taut_service", "--config", str(self.file)]
        super().__init__(argv, folder / f"{name}.log")

    async def start_and_wait(self) -> None:
        self.start()
        await eventually(self.ready)

    def ready(self) -> bool:
        if not self.running:
            raise AssertionError(f"the gateway ended at its start:\n{self.text()[-2000:]}")
        try:
            return call(self.port, "GET", "/health/ready")[0] == 200
        except OSError:
            return False

    def series(self) -> dict[str, float]:
        """Every sample of ``/metrics``: name with labels → value."""
        status, text = call(self.port, "GET", "/metrics")
        assert status == 200
        lines = (line for line in text.decode().splitlines() if line and line[0] != "#")
        return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines)}

    def total(self, metric: str, **labels: str) -> float:
        """Sum of a metric over the series that carry these labels."""
        wanted = [f'{name}="{value}"' for name, value in labels.items()]
        return sum(
            value
            for name, value in self.series().items()
            if re.split(r"[{ ]", name)[0] == metric and all(label in name for label in wanted)
        )

    def in_flight(self) -> float:
        """Requests the gateway believes to be open, counted in every way it has."""
        return (
            self.total("taut_inflight_requests")
            + self.total("taut_queued_requests")
            + self.total("taut_worker_outstanding_requests")
        )

    def problems(self) -> list[str]:
        """Lines of the log that speak of a bug of ours."""
        words = ("Traceback", "exception was never retrieved", "Error in atexit", "coroutine '")
        return [line for line in self.text().splitlines() if any(w in line for w in words)]


class LivenessProbe(Process):
    """Asks a gateway whether it lives, over and over; a process of its own, as a kubelet is.

    A thread of the load's process would wait for that one's interpreter and measure it.
    """

    def __init__(self, port: int, log: Path) -> None:
        super().__init__([str(Path(__file__).with_name("liveness_probe.py")), str(port)], log)

    def seconds(self) -> list[float]:
        """Return what each answer took; the one that never came, if any, is in it so far."""
        return [float(line) for line in self.text().splitlines()]


@dataclass
class House:
    """Gateways and the workers behind them."""

    gateways: list[Gateway]
    engines: list[Engine]
    folder: Path

    @property
    def gateway(self) -> Gateway:
        return self.gateways[0]

    @property
    def port(self) -> int:
        return self.gateway.port

    async def quiet(self, timeout_s: float = 10) -> None:
        """Wait until nobody holds a request any more: neither gateway nor worker."""

        def still() -> bool:
            engines = [engine.state()["open"] for engine in self.engines if engine.running]
            return not any(engines) and not any(g.in_flight() for g in self.gateways if g.running)

        await eventually(still, timeout_s)

    def malformed(self) -> list[str]:
        """What workers were sent that they should never see."""
        return [note for e in self.engines if e.running for note in e.state()["malformed"]]


@asynccontextmanager
async def house(
    folder: Path,
    *,
    engines: int = 1,
    gateways: int = 1,
    behaviour: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[House]:
    """Start workers and gateways.

    At the end no gateway may have logged a traceback, and no worker that lives may have seen a
    malformed request.
    """
    workers = [Engine(folder / f"engine{i}.log", behaviour or {}) for i in range(engines)]
    listed = [{"name": f"w{i}", "url": f"http://{HOST}:{e.port}"} for i, e in enumerate(workers)]
    document = {
        "models": [{"name": MODEL, "max_model_len": 4096, "workers": listed, **(model or {})}],
        "timeouts": QUICK,
        **settings,
    }
    doors = [Gateway(folder, f"gateway{i}", document) for i in range(gateways)]
    try:
        for engine in workers:
            engine.start()
        for engine in workers:
            await eventually(lambda engine=engine: opens(engine.port))  # type: ignore[misc]
        for door in doors:
            door.start()
        for door in doors:
            await eventually(door.ready)
        home = House(doors, workers, folder)
        yield home
        assert home.malformed() == []
    finally:
        for process in [*doors, *workers]:
            with contextlib.suppress(ProcessLookupError):
                await process.kill()
    for door in doors:
        assert door.problems() == []


def opens(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


async def eventually(condition: Callable[[], Any], timeout_s: float = HANGS_S) -> None:
    """Wait until a condition holds; with pauses, since to ask another process costs that one."""
    await patience.eventually(condition, timeout_s, pause_s=0.02)
