"""What is not body is bounded in bytes, number and time, on both sides of the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from gateway_harness import COMPLETION, Client, Harness, eventually, gateway, settings_for
from mock_engine import Faults, MockEngine
from patience import within

from taut_service.config.settings import Timeouts
from taut_service.http.framing import MAX_FIELDS, MAX_HEAD_BYTES, MAX_TRAILERS
from taut_service.http.protocol import MAX_PIPELINED
from taut_service.worker.connection import Connection
from taut_service.worker.upstream_errors import ProtocolError, StallError

BODY = json.dumps(COMPLETION).encode()
TRAILER = b"x-a: bbbbbbbb\r\n"
PATHS = (
    "GET /health/live",
    "GET /metrics",
    "GET /v1/models",
    "POST /v1/completions",
    "PUT /nowhere",
)
FLOODS = {
    "trailers": (b"0\r\n", TRAILER * 1000),
    "one trailer's name": (b"0\r\nx", b"y" * 15_000),
    "one trailer's value": (b"0\r\nx: ", b"y" * 15_000),
    "one chunk extension": (b"5;a=", b"y" * 15_000),
    "chunk extensions": (b"", (b"1;a=%b\r\n \r\n" % (b"y" * 500)) * 30),
}
MOST = MAX_HEAD_BYTES + 2 * 256 * 1024
"""What may pass before an end is seen: the bound, a read, and a read that was on its way."""
SOCKETS = 8 * 1024 * 1024
"""What the kernel holds for a receiver that has closed already."""


def chunked(target: str = "POST /v1/completions", first: bytes = b"", **headers: str) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"{target} HTTP/1.1\r\nhost: t\r\n{lines}transfer-encoding: chunked\r\n\r\n"
    return head.encode() + first


def piece(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.fixture
def quick_framing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taut_service.http.protocol.FRAMING_TIMEOUT_S", 0.3)


@asynccontextmanager
async def one_gateway(**sections: object) -> AsyncIterator[tuple[Harness, MockEngine]]:
    async with (
        MockEngine() as engine,
        gateway(settings_for(engine.url, **sections)) as harness,
    ):
        yield harness, engine


async def flood(client: Client, piece_of_it: bytes) -> int:
    """Send for ever; return how much the other side took, read by read, before it closed."""
    sent = 0
    try:
        while sent < SOCKETS:
            client.writer.write(piece_of_it)
            await client.writer.drain()
            sent += len(piece_of_it)
            await asyncio.sleep(0)
    except ConnectionError:
        pass
    return sent


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("name", FLOODS)
async def test_endless_framing_ends_the_connection(name: str, target: str) -> None:
    first, rest = FLOODS[name]
    keys = [{"name": "a", "sha256": "0" * 64}]
    async with one_gateway(api_keys=keys) as (harness, engine):
        started = engine.started
        client = await harness.connect()
        client.writer.write(chunked(target, first))
        assert await flood(client, rest) < MOST
        client.close()
        await eventually(lambda: not harness.server.server_state.connections)
        assert harness.app.drain.live == 0
        assert engine.started == started


@pytest.mark.parametrize("name", FLOODS)
async def test_endless_framing_of_a_request_that_is_waited_for_is_refused(name: str) -> None:
    first, rest = FLOODS[name]
    async with one_gateway() as (harness, engine):
        started = engine.started
        client = await harness.connect()
        client.writer.write(chunked(first=piece(BODY) + first))
        # As much as it takes and no more, so that the answer is not lost to a reset.
        flood = rest * (MAX_HEAD_BYTES // len(rest) + 2)
        for start in range(0, len(flood), 4000):
            if harness.app.drain.live == 0 and start:
                break
            client.writer.write(flood[start : start + 4000])
            await asyncio.sleep(0.005)
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (400, "invalid_http")
        assert answer.headers["connection"] == "close"
        assert await client.reader.read() == b""
        await eventually(lambda: harness.app.drain.live == 0)
        assert engine.started == started
        client.close()


def every_drip() -> Iterator[tuple[str, bytes, bytes]]:
    yield "head", b"GET /health/live HTTP/1.1\r\nhost: t\r\n", b"x-a: b\r\n"
    for target in PATHS:
        yield "trailers", chunked(target, b"0\r\n"), b"x-a: b\r\n"
        yield "chunk extension", chunked(target, b"5;a="), b"b"
    yield "line ends", b"GET /health/live HTTP/1.1\r\nhost: t\r\n\r\n", b"\r\n"
    yield "body of an answered request", chunked("GET /health/live"), piece(b"b")


@pytest.mark.parametrize(("name", "first", "drip"), list(every_drip()))
@pytest.mark.usefixtures("quick_framing")
async def test_framing_that_drips_ends_the_connection(name: str, first: bytes, drip: bytes) -> None:
    async with one_gateway() as (harness, _):
        client = await harness.connect()
        client.writer.write(first)

        def ended() -> bool:
            client.writer.write(drip)
            return not harness.server.server_state.connections

        # A drop every 20 ms: far below every limit on silence.
        await eventually(ended, 2, 0.02)
        await eventually(lambda: harness.app.drain.live == 0)
        client.close()


@pytest.mark.usefixtures("quick_framing")
async def test_honest_client_may_pause_within_its_body() -> None:
    async with one_gateway() as (harness, engine):
        client = await harness.connect()
        client.writer.write(chunked(first=piece(BODY[:5])[:-2]))
        for rest in (b"\r\n", piece(BODY[5:9]), piece(BODY[9:]), b"0\r\n\r\n"):
            await asyncio.sleep(0.5)
            client.writer.write(rest)
        assert (await client.answer()).status == 200
        assert engine.seen[-1].body == BODY
        client.close()


async def test_smallest_chunks_are_no_flood() -> None:
    body = json.dumps({**COMPLETION, "user": "u" * 60_000}).encode()
    async with one_gateway() as (harness, engine):
        client = await harness.connect()
        client.writer.write(chunked())
        whole = b"".join(b"01;a\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        for start in range(0, len(whole), 8000):
            client.writer.write(whole[start : start + 8000])
            await client.writer.drain()
            await asyncio.sleep(0.001)
        assert (await client.answer()).status == 200
        assert engine.seen[-1].body == body
        client.close()


async def test_trailers_are_dropped() -> None:
    async with one_gateway() as (harness, engine):
        client = await harness.connect()
        for _ in range(3):
            trailers = b"x-session-id: evil\r\n" * MAX_TRAILERS
            client.writer.write(chunked(first=piece(BODY) + b"0\r\n" + trailers + b"\r\n"))
            assert (await client.answer()).status == 200
            assert "x-session-id" not in engine.seen[-1].headers
        client.close()


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("lines", "allowed"),
    [
        (b"x-a: b\r\n" * (MAX_FIELDS - 2), True),
        (b"x-a: b\r\n" * (MAX_FIELDS - 1), False),
        (b"x-a: " + b"b" * (MAX_HEAD_BYTES - 100) + b"\r\n", True),
        (b"x-a: " + b"b" * MAX_HEAD_BYTES + b"\r\n", False),
        (b"x" * MAX_HEAD_BYTES + b": b\r\n", False),
    ],
)
async def test_head_has_its_bounds_however_it_arrives(
    lines: bytes, allowed: bool, at_once: bool
) -> None:
    head = b"GET /health/live HTTP/1.1\r\nhost: t\r\ncontent-length: 0\r\n" + lines + b"\r\n"
    async with one_gateway() as (harness, _):
        client = await harness.connect()
        step = len(head) if at_once else 20_000
        for start in range(0, len(head), step):
            client.writer.write(head[start : start + step])
            await client.writer.drain()
            await asyncio.sleep(0.01)
        answer = await client.answer()
        assert answer.status == (200 if allowed else 400)
        client.close()


async def test_requests_before_a_wrong_one_are_answered() -> None:
    request = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n%b"
    good = request % (len(BODY), BODY)
    async with (
        MockEngine(Faults(latency_s=0.2)) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        client = await harness.connect()
        client.writer.write(good + good + b"GARBAGE\r\n\r\n" + good)
        assert [(await client.answer()).status for _ in range(2)] == [200, 200]
        assert await client.reader.read() == b""
        assert engine.started == 2
        client.close()


async def test_number_of_requests_sent_ahead_is_bounded() -> None:
    async with one_gateway() as (harness, _):
        client = await harness.connect()
        client.writer.write(b"GET /health/live HTTP/1.1\r\nhost: t\r\n\r\n" * 3000)
        answers = 0
        while True:
            try:
                assert (await client.answer()).status == 200
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            answers += 1
        assert 1 <= answers <= MAX_PIPELINED + 1
        client.close()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE = HEAD % b"application/json" + piece(b'{"choices":[]}')
STREAM = HEAD % b"text/event-stream" + piece(b'data: {"choices":[]}\n\n')
WORKER_FLOODS = {
    "trailers": b"0\r\n" + TRAILER * 100_000,
    "one trailer": b"0\r\nx" + b"y" * 1_000_000,
    "chunk extension": b"5;a=" + b"y" * 1_000_000,
    "chunk extensions": (b"1;a=%b\r\n \r\n" % (b"y" * 500)) * 2000,
}


@pytest.mark.parametrize("name", WORKER_FLOODS)
async def test_flood_of_a_worker_is_a_broken_answer(name: str) -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        engine.faults = Faults(raw=WHOLE + WORKER_FLOODS[name])
        answer = await harness.post(COMPLETION)
        assert (answer.status, answer.error["code"]) == (502, "worker_lost")
        engine.faults = Faults(raw=STREAM + WORKER_FLOODS[name])
        answer = await harness.post({**COMPLETION, "stream": True})
        assert answer.status == 200
        last = answer.body.rstrip().rsplit(b"\n\n", 1)[-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "worker_lost"


@pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 502)])
async def test_worker_may_send_as_many_trailers_as_a_client(more: int, status: int) -> None:
    # Compiled, ``append`` of the list's subclass that counted them was not called.
    trailers = b"x-a: b\r\n" * (MAX_TRAILERS + more)
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        engine.faults = Faults(raw=WHOLE + b"0\r\n" + trailers + b"\r\n")
        answer = await harness.post(COMPLETION)
        assert answer.status == status
        assert "x-a" not in answer.headers


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\n" + b"x-a: b\r\n" * (MAX_FIELDS + 1) + b"content-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * MAX_HEAD_BYTES + b"\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nx: y\r\n\r\n" * 5000,
    ],
)
async def test_head_of_a_worker_has_its_bounds(raw: bytes) -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        engine.faults = Faults(raw=raw)
        answer = await harness.post(COMPLETION)
        assert (answer.status, answer.error["code"]) == (502, "worker_lost")


@pytest.mark.parametrize(
    ("first", "drip"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"x-a: b\r\n"),
        (WHOLE + b"0\r\n", b"x-a: b\r\n"),
        (WHOLE + b"5;", b"a"),
    ],
)
async def test_framing_that_drips_from_a_worker_is_silence(first: bytes, drip: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(first)
        try:
            while True:
                await writer.drain()
                await asyncio.sleep(0.02)
                writer.write(drip)
        except ConnectionError:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    times = Timeouts(first_byte_s=0.3, idle_s=0.3)
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: Connection(lambda _: None, times), host, port
    )

    async def read_all() -> None:
        await connection.exchange(b"GET / HTTP/1.1\r\nhost: t\r\n\r\n", b"")
        while await connection.read():
            pass

    with pytest.raises((StallError, ProtocolError)):
        await within(1.2, read_all())
    connection.abort()
    server.close()
