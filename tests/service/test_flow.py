"""Events flow from socket to socket within one call; the task takes over where that cannot be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from gateway_harness import COMPLETION, gateway, settings_for
from mock_engine import Faults, MockEngine

from taut_service.built import how_built
from taut_service.config.settings import Timeouts
from taut_service.http.client_exchange import ClientExchange
from taut_service.worker.connection import Connection
from taut_service.worker.upstream_errors import ConnectionLostError

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Worker:
    """Answers one request in the pieces that a test sends."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def send(self, text: bytes) -> None:
        """One chunk, and time for it to arrive."""
        self._writer.write(b"%x\r\n%b\r\n" % (len(text), text))
        await asyncio.sleep(0.05)

    def end(self) -> None:
        self._writer.write(b"0\r\n\r\n")

    def reset(self) -> None:
        self._writer.transport.abort()


@asynccontextmanager
async def answering() -> AsyncIterator[tuple[Connection, Worker]]:
    """A connection whose answer has begun, and the worker at its other end."""
    arrived: asyncio.Queue[Worker] = asyncio.Queue()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        arrived.put_nowait(Worker(writer))

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: Connection(lambda _: None, Timeouts()), host, port
    )
    try:
        await connection.exchange(b"GET / HTTP/1.1\r\n\r\n", b"")
        yield connection, await arrived.get()
    finally:
        connection.abort()
        server.close()


async def test_pieces_are_handed_over_until_the_end() -> None:
    taken: list[bytes] = []
    async with answering() as (connection, worker):
        flow = asyncio.create_task(connection.flow_into(lambda data: not taken.append(data)))
        for text in (b"one", b"two", b"three"):
            await worker.send(text)
        assert taken == [b"one", b"two", b"three"]
        assert not flow.done()
        worker.end()
        await flow
        assert await connection.read() == b""
        assert connection.finish()


async def test_taker_that_has_enough_leaves_the_rest_to_read() -> None:
    taken: list[bytes] = []

    def take(data: bytes) -> bool:
        taken.append(data)
        return False

    async with answering() as (connection, worker):
        flow = asyncio.create_task(connection.flow_into(take))
        await worker.send(b"one")
        await flow
        await worker.send(b"two")
        assert taken == [b"one"]
        # What waits is not passed over by what comes later.
        await connection.flow_into(take)
        assert await connection.read() == b"two"


async def test_worker_that_is_lost_ends_the_flow_and_read_says_so() -> None:
    async with answering() as (connection, worker):
        flow = asyncio.create_task(connection.flow_into(lambda _: True))
        await worker.send(b"one")
        worker.reset()
        await flow
        with pytest.raises(ConnectionLostError):
            await connection.read()


async def test_streams_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    if how_built() == "compiled":
        pytest.skip("replaces compiled methods: test_compiled.py runs it on Python")
    written: list[bytes] = []
    original = ClientExchange.write_events

    def spy(self: Any, events: bytes) -> bool:
        written.append(events)
        return original(self, events)

    monkeypatch.setattr(ClientExchange, "write_events", spy)
    async with (
        MockEngine(Faults(tokens=5, interval_s=0.03)) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        answer = await harness.post({**COMPLETION, "stream": True})
        events = answer.body.split(b"\n\n")[:-1]
        assert len(events) == 6
        # The first goes by ASGI, with the head; each of the others in a write of its own.
        assert len(written) >= 4
        assert answer.body.endswith(b"".join(written))
