"""A worker for tests: real sockets, enough of vLLM's OpenAI server, and faults on demand.

It answers ``/health``, ``/v1/completions``, ``/v1/chat/completions`` (whole and streamed),
``/tokenize``, ``/detokenize`` and ``/v1/embeddings``, remembers every request, and knows which
ones the client broke off. ``python mock_engine.py --port P`` runs it alone, for the benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httptools
import mock_dialects

COMPLETION_PATHS = ("/v1/completions", "/v1/chat/completions", *mock_dialects.PATHS)


@dataclass
class Faults:
    """What to do wrong, and how slowly. Changed by tests while the engine runs.

    ``latency_s`` is spent before the first byte, ``interval_s`` before each further token.
    ``kill_at_byte`` resets the connection when that many bytes of a completion's response (head
    included) are out. ``close_reused`` closes a connection instead of answering its second
    request, as a server does whose keep-alive limit passes at the wrong moment. ``reset`` answers
    no completion at all. ``status`` answers completions with that status and ``error_body``.
    Probes (one token, temperature 0) are exempt from all of it.
    """

    latency_s: float = 0.0
    interval_s: float = 0.0
    tokens: int = 4
    token: str = " tok"
    first_token: str = " Paris"
    health: int = 200
    status: int = 200
    error_body: bytes = b'{"error":{"message":"mock","type":"X","param":null,"code":1}}'
    kill_at_byte: int | None = None
    close_reused: bool = False
    reset: bool = False
    raw: bytes | None = None
    absent: set[str] = field(default_factory=set)
    metrics: bytes | None = None
    golden_status: int = 200
    chunk: int | None = None


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 5, "total_tokens": 5 + tokens, "completion_tokens": tokens}


def text_of(tokens: list[str], chat: bool, streamed: bool) -> dict[str, Any]:
    text = "".join(tokens)
    if chat:
        return {"delta" if streamed else "message": {"role": "assistant", "content": text}}
    return {"text": text}


class MockEngine:
    """The server. ``async with MockEngine() as engine`` listens on ``engine.port``."""

    def __init__(self, faults: Faults | None = None, port: int = 0) -> None:
        self.faults = faults or Faults()
        self.port = port
        self.seen: list[Seen] = []
        self.probes = 0
        self.started = 0
        self.completed = 0
        self.aborted = 0
        self.connections: set[Conversation] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> int:
        """Completions that have begun and neither ended nor been broken off."""
        return self.started - self.completed - self.aborted

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Conversation(self), "127.0.0.1", self.port, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and reset every connection, as a killed process would."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for conversation in list(self.connections):
            conversation.kill()
        await asyncio.sleep(0)

    async def __aenter__(self) -> MockEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class Conversation(asyncio.Protocol):
    """One connection."""

    def __init__(self, engine: MockEngine) -> None:
        self.engine = engine
        self.transport: asyncio.Transport | None = None
        self.task: asyncio.Task[None] | None = None
        self.served = 0
        self.writable = asyncio.Event()
        self.writable.set()
        self.budget: int | None = None
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.engine.connections.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        self.transport = None
        self.engine.connections.discard(self)
        self.writable.set()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers: dict[str, str] = {}
        self.body = b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        method = self.parser.get_method().decode()
        request = Seen(method, self.url.decode(), self.headers, self.body)
        self.task = asyncio.get_running_loop().create_task(self.respond(request))

    def kill(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    async def respond(self, request: Seen) -> None:
        self.budget = None
        self.served += 1
        path = request.path.partition("?")[0]
        faults = self.engine.faults
        if path == "/health":
            self.write(faults.health, b"")
        elif path == "/metrics" and faults.metrics is not None:
            self.write(200, faults.metrics)
        elif path in faults.absent:
            self.write(404, b'{"detail":"Not Found"}')
        elif path in COMPLETION_PATHS:
            with contextlib.suppress(asyncio.CancelledError):
                await self.complete(request, path)
        elif path in ("/tokenize", "/detokenize", "/v1/embeddings", "/v1/messages/count_tokens"):
            self.engine.seen.append(request)
            answer = {"path": path, "usage": {"prompt_tokens": 3, "total_tokens": 3}}
            self.write(200, json.dumps(answer).encode())
        else:
            self.write(404, b'{"detail":"Not Found"}')

    async def complete(self, request: Seen, path: str) -> None:
        engine, faults = self.engine, self.engine.faults
        body = request.json
        if body.get("max_tokens") == 1 and body.get("temperature") == 0:
            engine.probes += 1
            answer = {"choices": [{"index": 0, "text": faults.first_token}], "usage": usage(1)}
            self.write(faults.golden_status, json.dumps(answer).encode())
            return
        engine.seen.append(request)
        if faults.reset or (faults.close_reused and self.served > 1):
            self.kill()
            return
        engine.started += 1
        self.budget = faults.kill_at_byte
        try:
            if faults.latency_s:
                await asyncio.sleep(faults.latency_s)
            if faults.raw is not None:
                self.put(faults.raw)
            elif faults.status != 200:
                self.write(faults.status, faults.error_body)
            elif body.get("stream"):
                await self.stream(body, path)
            else:
                await self.whole(body, path)
        except asyncio.CancelledError:
            engine.aborted += 1
            raise
        engine.completed += 1

    async def whole(self, body: dict[str, Any], path: str) -> None:
        faults = self.engine.faults
        if faults.interval_s:
            await asyncio.sleep(faults.interval_s * faults.tokens)
        tokens = [faults.token] * faults.tokens
        if path in mock_dialects.PATHS:
            self.write(200, json.dumps(mock_dialects.whole(body, path, tokens)).encode())
            return
        choice = text_of(tokens, "chat" in path, streamed=False)
        answer = {"id": "x", "model": body.get("model"), "choices": [choice]}
        self.write(200, json.dumps({**answer, "usage": usage(faults.tokens)}).encode())

    def events(self, body: dict[str, Any], path: str) -> Iterator[bytes]:
        faults = self.engine.faults
        if path in mock_dialects.PATHS:
            yield from mock_dialects.events(body, path, [faults.token] * faults.tokens)
            return
        chat, named = "chat" in path, {"id": "x", "model": body.get("model")}
        options = body.get("stream_options") or {}
        counted = options.get("include_usage")
        for number in range(1, faults.tokens + 1):
            part = {**named, "choices": [text_of([faults.token], chat, streamed=True)]}
            if counted and options.get("continuous_usage_stats"):
                part["usage"] = usage(number)
            yield self.event(part)
        if counted:
            yield self.event({**named, "choices": [], "usage": usage(faults.tokens)})
        yield b"data: [DONE]\n\n"

    @staticmethod
    def event(document: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(document).encode() + b"\n\n"

    async def stream(self, body: dict[str, Any], path: str) -> None:
        faults = self.engine.faults
        self.put(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for event in self.events(body, path):
            for piece in cut(event, faults.chunk):
                self.put(b"%x\r\n%b\r\n" % (len(piece), piece))
                await self.writable.wait()
                if faults.chunk:
                    await asyncio.sleep(0.001)
            if faults.interval_s:
                await asyncio.sleep(faults.interval_s)
        self.put(b"0\r\n\r\n")

    def write(self, status: int, body: bytes) -> None:
        self.put(
            b"HTTP/1.1 %d X\r\nserver: mock\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (status, len(body), body)
        )

    def put(self, data: bytes) -> None:
        if self.transport is None:
            raise asyncio.CancelledError
        if self.budget is not None and len(data) > self.budget:
            self.transport.write(data[: self.budget])
            # Closing, not aborting, so that the bytes before the cut are sent.
            self.transport.close()
            self.transport = None
            raise asyncio.CancelledError
        if self.budget is not None:
            self.budget -= len(data)
        self.transport.write(data)


def cut(data: bytes, size: int | None) -> list[bytes]:
    if size is None:
        return [data]
    return [data[i : i + size] for i in range(0, len(data), size)]


async def run_alone(port: int, tokens: int, interval_s: float) -> None:
    async with MockEngine(Faults(tokens=tokens, interval_s=interval_s), port) as engine:
        engine.seen = Forgetful()
        await asyncio.Event().wait()


class Forgetful(list[Seen]):
    """Keeps nothing, so that a long benchmark measures no growing list."""

    def append(self, _: Seen) -> None:
        pass


if __name__ == "__main__":
    import uvloop

    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--interval-s", type=float, default=0.0)
    options = parser.parse_args()
    uvloop.run(run_alone(options.port, options.tokens, options.interval_s))
