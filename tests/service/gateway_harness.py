"""A gateway on a free port in the test's own loop, and a client that shows the bytes."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mock_engine import MockEngine
from patience import HANGS_S, eventually

from taut_service.app import create_app
from taut_service.config.settings import Settings
from taut_service.http.front import Front
from taut_service.http.server import GatewayServer, listen
from taut_service.http.tls import ServerTls
from taut_service.worker.prober import ProbeTimes

MODEL = "m"
QUICK = ProbeTimes(
    not_ready_s=0.03, ready_s=0.1, woken_s=0.01, health_timeout_s=0.5, first_look_s=0
)
COMPLETION = {"model": MODEL, "prompt": "hello", "max_tokens": 8}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


def settings_for(*urls: str, golden: bool = True, **sections: Any) -> Settings:
    model: dict[str, Any] = {
        "name": MODEL,
        "max_model_len": 64,
        "provenance": {"method": "W8A8", "bits": 8},
        "workers": [{"name": f"w{i}", "url": url} for i, url in enumerate(urls)],
    }
    if golden:
        model["golden"] = {"prompt": "The capital of France is", "expected_text": " Paris"}
    return Settings.model_validate({"models": [model], **sections})


def variants_for(variants: dict[str, list[MockEngine]], **model: Any) -> dict[str, Any]:
    """Return a model whose variants have these engines, named by variant and number."""
    golden = {"prompt": "The capital of France is", "expected_text": " Paris"}
    entries = []
    for name, engines in variants.items():
        entry: dict[str, Any] = {"name": name, **model.get("each", {}).get(name, {})}
        if engines:
            entry["workers"] = [
                {"name": f"{name}-{i}", "url": engine.url} for i, engine in enumerate(engines)
            ]
        entries.append(entry)
    rest = {key: value for key, value in model.items() if key != "each"}
    return {"name": MODEL, "max_model_len": 64, "golden": golden, "variants": entries, **rest}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


class Client:
    """One HTTP/1.1 connection, used as its owner likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        fields = {"host": "t", "content-length": str(len(body)), **(headers or {})}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.writer.write(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body)
        await self.writer.drain()

    async def head(self) -> Answer:
        status_line, *lines = (
            (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        )
        headers = dict(line.split(": ", 1) for line in lines if line)
        return Answer(int(status_line.split(" ")[1]), headers, b"")

    async def begin_stream(self) -> Answer:
        """Ask for a stream; return the head of its answer."""
        await self.send(
            "POST", "/v1/completions", json.dumps({**COMPLETION, "stream": True}).encode()
        )
        return await self.head()

    async def chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self.reader.readline(), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readline()

    async def answer(self) -> Answer:
        answer = await self.head()
        if "content-length" in answer.headers:
            answer.body = await self.reader.readexactly(int(answer.headers["content-length"]))
        else:
            answer.body = b"".join([chunk async for chunk in self.chunks()])
        return answer

    def close(self) -> None:
        self.writer.transport.abort()


@dataclass
class Harness:
    """A running gateway."""

    app: Front
    port: int
    server: GatewayServer
    log: io.StringIO

    async def connect(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port))

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | dict[str, Any] = b"",
        headers: dict[str, str] | None = None,
    ) -> Answer:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        client = await self.connect()
        try:
            async with asyncio.timeout(2 * HANGS_S):
                await client.send(method, path, data, headers)
                return await client.answer()
        finally:
            client.close()

    async def post(
        self, body: bytes | dict[str, Any], path: str = "/v1/completions", **headers: str
    ) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.request("POST", path, body, named)

    async def metric(self, series: str) -> float:
        text = (await self.request("GET", "/metrics")).body.decode()
        values = [
            line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(series + " ")
        ]
        assert len(values) == 1, f"{series} appears {len(values)} times"
        return float(values[0])

    async def wait_ready(self, timeout_s: float = HANGS_S) -> None:
        await eventually(self.is_ready, timeout_s)

    async def is_ready(self) -> bool:
        return (await self.request("GET", "/health/ready")).status == 200

    async def states(self) -> dict[str, str]:
        report = (await self.request("GET", "/health/ready")).json
        return {
            worker["name"]: worker["state"]
            for model in report["models"].values()
            for worker in model["workers"]
        }


@asynccontextmanager
async def gateway(
    settings: Settings,
    *,
    ready: bool = True,
    path: Path | None = None,
    times: ProbeTimes = QUICK,
    tls: ServerTls | None = None,
) -> AsyncIterator[Harness]:
    """Run a gateway; wait until it is ready unless told not to. ``path`` is read by a reload."""
    log = io.StringIO()
    app = create_app(settings, path=path, probe_times=times, log_stream=log)
    server = GatewayServer(app, settings.drain_timeout_s, tls=tls)
    # The steps of uvicorn's serve() without its signal handlers, which are the test runner's, and
    # without its tenths of seconds of polling.
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    opened = listen("127.0.0.1", 0)
    await server.startup([opened])
    await server.on_tick(0)
    try:
        harness = Harness(app, opened.getsockname()[1], server, log)
        # Over TLS the harness cannot ask, so it looks.
        if ready and tls is not None:
            await eventually(lambda: all(w.ready for _, _, w in app.reloader.current.workers()))
        elif ready:
            await harness.wait_ready()
        yield harness
    finally:
        for listener in server.servers:
            listener.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await eventually(lambda: not server.server_state.tasks)
        await server.lifespan.shutdown()
