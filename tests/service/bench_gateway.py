"""Requests and events per CPU-second of the gateway, everything on, in front of the mock engine.

    python tests/service/bench_gateway.py [--seconds 5] [--repeats 5]

The gateway has core 0 to itself; the mock engine and this client share the others. CPU time is
the gateway process's own (user + system, from /proc), so the figure holds on a shared machine
where wall time does not.
Rows: whole answers at 32 connections with a prompt of 800 bytes and of 128 KiB, and 100 streams
    paced at 20 ms a token. Prints one JSON line a row: median, lowest and highest of the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httptools
import uvloop
import yaml

HERE = Path(__file__).parent
TICK = os.sysconf("SC_CLK_TCK")


class Row(NamedTuple):
    name: str
    connections: int
    prompt_bytes: int
    stream: bool


ROWS = (
    Row("whole 800 B", 32, 800, False),
    Row("whole 128 KiB", 32, 128 * 1024, False),
    Row("streams paced 20 ms", 100, 800, True),
)


class Visitor(asyncio.Protocol):
    """One connection that asks again as soon as it is answered."""

    def __init__(self, request: bytes, bench: Bench) -> None:
        self.request = request
        self.bench = bench
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.bench.events += body.count(b"data:")

    def on_message_complete(self) -> None:
        status = self.parser.get_status_code()
        self.bench.done += status == 200
        self.bench.failed += status != 200
        if self.bench.open:
            self.transport.write(self.request)  # type: ignore[attr-defined]


class Bench:
    def __init__(self) -> None:
        self.done = self.failed = self.events = 0
        self.open = True


def request_of(row: Row) -> bytes:
    message = {"role": "user", "content": "x" * row.prompt_bytes}
    body = json.dumps({"model": "m", "messages": [message], "stream": row.stream}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\nuser-agent: bench\r\naccept: */*\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def drive(row: Row, port: int, seconds: float) -> Bench:
    bench = Bench()
    loop = asyncio.get_running_loop()
    request = request_of(row)
    for _ in range(row.connections):
        await loop.create_connection(lambda: Visitor(request, bench), "127.0.0.1", port)
    await asyncio.sleep(seconds)
    bench.open = False
    return bench


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def process(cores: set[int], *command: str) -> Iterator[int]:
    started = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(HERE)},
    )
    try:
        yield started.pid
    finally:
        started.terminate()
        started.wait(20)


def wait_ready(port: int) -> None:
    environment = {**os.environ, "TAUT_GATEWAY_PORT": str(port)}
    command = [sys.executable, "-m", "taut_service.healthcheck", "ready"]
    for _ in range(100):
        if (
            subprocess.run(command, env=environment, capture_output=True, check=False).returncode
            == 0
        ):
            return
        time.sleep(0.05)
    raise TimeoutError("the gateway did not become ready")


def configuration(folder: str, engine_port: int) -> Path:
    worker = {"name": "w", "url": f"http://127.0.0.1:{engine_port}"}
    golden = {"prompt": "x", "expected_text": " Paris"}
    model = {"name": "m", "max_model_len": 131_072, "golden": golden, "workers": [worker]}
    settings = {"models": [model], "admission": {"max_inflight": 256}}
    file = Path(folder) / "gateway.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def measure(row: Row, seconds: float) -> tuple[float, float]:
    """Return requests (or events, of streams) per CPU-second and per second."""
    cores = sorted(os.sched_getaffinity(0))
    others = set(cores[1:] or cores)
    engine_port, port = free_port(), free_port()
    interval = "0.02" if row.stream else "0"
    tokens = "500" if row.stream else "4"
    engine = [str(HERE / "mock_engine.py"), "--port", str(engine_port)]
    engine += ["--tokens", tokens, "--interval-s", interval]
    with tempfile.TemporaryDirectory() as folder, process(others, *engine):
        file = configuration(folder, engine_port)
        command = ["-m", "taut_service", "--config", str(file), "--port", str(port)]
        with process({cores[0]}, *command) as gateway:
            wait_ready(port)
            os.sched_setaffinity(0, others)
            try:
                before = cpu_seconds(gateway)
                bench = uvloop.run(drive(row, port, seconds))
                spent = cpu_seconds(gateway) - before
            finally:
                os.sched_setaffinity(0, cores)
    if bench.failed or not (bench.done or bench.events):
        raise SystemExit(f"{row.name}: {bench.failed} answers were not 200, {bench.done} were")
    count = bench.events if row.stream else bench.done
    return count / spent, count / seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for row in ROWS:
        results = [measure(row, options.seconds) for _ in range(options.repeats)]
        rates = [rate for rate, _ in results]
        line = {
            "row": row.name,
            "unit": "events per CPU-s" if row.stream else "requests per CPU-s",
            "median": round(statistics.median(rates)),
            "lowest": round(min(rates)),
            "highest": round(max(rates)),
            "per_second": round(statistics.median(wall for _, wall in results)),
            "connections": row.connections,
            "repeats": options.repeats,
            "date": time.strftime("%Y-%m-%d"),
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main()
