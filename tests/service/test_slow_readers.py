"""Clients that do not read, or hardly, do not keep a place; those that are merely slow do."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import COMPLETION, Harness, eventually, gateway, settings_for
from mock_engine import Faults, MockEngine
from pydantic import ValidationError

from taut_service.config.settings import Timeouts

SLOW_READER = 'taut_client_connections_closed_total{reason="slow_reader"}'
TIMES = {"write_s": 0.4, "write_min_bytes_per_s": 50_000}
ENDLESS = Faults(tokens=20_000, token="t" * 2000)
STREAM = {**COMPLETION, "stream": True}


async def narrow_client(harness: Harness, document: dict[str, Any], head: bytes = b"") -> Any:
    """Send a request on a socket with the smallest receive buffer; nothing reads from it."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(found, ("127.0.0.1", harness.port))
    body = json.dumps(document).encode()
    line = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n" % len(body)
    await loop.sock_sendall(found, line + head + b"\r\n" + body)
    return found


async def read_at(found: socket.socket, bytes_per_s: float, seconds: float) -> int:
    """Read at a pace; return how much came, until the end or until the time is up."""
    loop = asyncio.get_running_loop()
    begin, taken = time.monotonic(), 0
    while (now := time.monotonic() - begin) < seconds:
        if taken > bytes_per_s * now:
            await asyncio.sleep(0.005)
            continue
        try:
            async with asyncio.timeout(1):
                data = await loop.sock_recv(found, 4096)
        except ConnectionError:
            break
        if not data:
            break
        taken += len(data)
    return taken


@pytest.mark.parametrize("bytes_per_s", [0, 10_000])
@pytest.mark.parametrize("document", [COMPLETION, STREAM], ids=["whole", "stream"])
async def test_reader_below_the_pace_is_cut_off(document: dict[str, Any], bytes_per_s: int) -> None:
    admission = {"max_inflight": 1, "queue_timeout_s": 5}
    settings: dict[str, Any] = {"timeouts": TIMES, "admission": admission}
    async with MockEngine(ENDLESS) as engine, gateway(settings_for(engine.url, **settings)) as h:
        found = await narrow_client(h, document)
        await eventually(lambda: engine.started == 1)
        reading = asyncio.create_task(read_at(found, bytes_per_s, 5))
        await eventually(lambda: h.app.drain.live == 0, 4)
        assert await h.metric(SLOW_READER) == 1
        assert await h.metric("taut_inflight_requests") == 0
        engine.faults = Faults()
        assert (await h.post(COMPLETION)).status == 200
        reading.cancel()
        found.close()


async def test_slow_reader_at_the_pace_gets_all_of_it() -> None:
    faults = Faults(tokens=300, token="t" * 2000)
    times = {**TIMES, "write_s": 1.0}
    async with (
        MockEngine(faults) as engine,
        gateway(settings_for(engine.url, timeouts=times)) as harness,
    ):
        found = await narrow_client(harness, STREAM, b"connection: close\r\n")
        taken = await read_at(found, 250_000, 10)
        assert taken > 300 * 2000
        await eventually(lambda: engine.completed == 1)
        assert await harness.metric(SLOW_READER) == 0
        found.close()


async def test_pause_shorter_than_the_limit_costs_nothing() -> None:
    faults = Faults(tokens=300, token="t" * 2000)
    times = {"write_s": 4.0, "write_min_bytes_per_s": 1}
    async with (
        MockEngine(faults) as engine,
        gateway(settings_for(engine.url, timeouts=times)) as harness,
    ):
        found = await narrow_client(harness, STREAM, b"connection: close\r\n")
        await asyncio.sleep(1)
        assert await read_at(found, 1e9, 10) > 300 * 2000
        assert await harness.metric(SLOW_READER) == 0
        found.close()


def take_little(harness: Harness) -> None:
    """Have the kernel take no more than 16 KiB of what is written to a client."""
    for server in harness.server.servers:
        for listener in server.sockets:
            # Inherited by connections.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)


@asynccontextmanager
async def with_an_answer_unread(
    size: int, head: bytes = b"", **times: float
) -> AsyncIterator[tuple[Harness, MockEngine, socket.socket]]:
    """Have a request that has ended, while its connection and bytes of its answer have not."""
    faults = Faults(tokens=1, token="t" * size)
    settings: dict[str, Any] = {"timeouts": {**TIMES, **times}}
    async with MockEngine(faults) as engine, gateway(settings_for(engine.url, **settings)) as h:
        take_little(h)
        found = await narrow_client(h, COMPLETION, head)
        await eventually(lambda: engine.completed == 1)
        await eventually(lambda: h.app.drain.live == 0)
        assert len(h.server.server_state.connections) == 1
        yield h, engine, found
        found.close()


@pytest.mark.parametrize("size", [20_000, 110_000, 900_000])
async def test_what_is_left_of_an_answer_does_not_wait_for_the_end_of_keep_alive(size: int) -> None:
    async with with_an_answer_unread(size, unread_s=0.2) as (harness, _, _):
        connections = harness.server.server_state.connections
        await eventually(lambda: not connections, 8)
        assert await harness.metric(SLOW_READER) == 1


@pytest.mark.parametrize("size", [110_000, 900_000])
async def test_what_is_left_of_a_last_answer_is_not_kept_for_ever(size: int) -> None:
    async with with_an_answer_unread(size, b"connection: close\r\n") as (harness, _, _):
        connections = harness.server.server_state.connections
        await eventually(lambda: not connections, 8)
        assert await harness.metric(SLOW_READER) == 1


async def test_reader_who_stops_where_little_is_left_is_cut_off() -> None:
    async with with_an_answer_unread(300_000, unread_s=0.05) as (harness, _, found):
        await asyncio.sleep(0.1)
        # Less than 16 KiB are left to be written: writing is no longer paused.
        assert await read_exactly(found, 270_000) == 270_000
        connections = harness.server.server_state.connections
        await eventually(lambda: not connections, 8)
        assert await harness.metric(SLOW_READER) == 1


async def test_rest_that_is_read_at_the_pace_comes_whole_and_the_connection_stays() -> None:
    times = {"unread_s": 0.05, "write_s": 1.5}
    async with with_an_answer_unread(300_000, **times) as (harness, engine, found):
        for _ in range(30):
            assert await read_exactly(found, 10_000) == 10_000
            await asyncio.sleep(0.1)
        loop = asyncio.get_running_loop()
        while (await loop.sock_recv(found, 4096))[-1:] != b"}":
            pass
        # All has been taken, which is not to take too little.
        await asyncio.sleep(2)
        engine.faults = Faults()
        await ask_again(found)
        assert b"200 OK" in await loop.sock_recv(found, 4096)
        assert await harness.metric(SLOW_READER) == 0


async def test_client_that_asks_again_before_it_reads_on_is_not_cut_off() -> None:
    times = {"unread_s": 0.05, "write_s": 2.0}
    async with with_an_answer_unread(20_000, **times) as (harness, engine, found):
        for _ in range(3):
            await asyncio.sleep(0.9)
            await ask_again(found)
        await eventually(lambda: engine.completed == 4)
        assert await read_exactly(found, 4 * 20_000) == 4 * 20_000
        assert await harness.metric(SLOW_READER) == 0


async def ask_again(found: socket.socket) -> None:
    body = json.dumps(COMPLETION).encode()
    line = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n" % len(body)
    await asyncio.get_running_loop().sock_sendall(found, line + body)


async def read_exactly(found: socket.socket, size: int) -> int:
    """Read so many bytes as fast as they come; return how many came before the end."""
    loop, taken = asyncio.get_running_loop(), 0
    async with asyncio.timeout(30):
        while taken < size and (data := await loop.sock_recv(found, min(4096, size - taken))):
            taken += len(data)
    return taken


async def test_idle_connection_is_kept_as_long_as_the_settings_say(tmp_path: Path) -> None:
    async with MockEngine() as engine:
        path = tmp_path / "gateway.yaml"
        settings = settings_for(engine.url, timeouts={"unread_s": 0.1, "keep_alive_s": 0.3})
        async with gateway(settings, path=path) as harness:
            client = await harness.connect()
            await client.send("GET", "/health/live")
            assert (await client.answer()).status == 200
            began = time.monotonic()
            assert await asyncio.wait_for(client.reader.read(), 30) == b""
            assert time.monotonic() - began > 0.25
            # A reload counts for whoever becomes idle after it.
            longer = {"unread_s": 0.1, "keep_alive_s": 3600.0}
            changed = settings_for(engine.url, timeouts=longer)
            path.write_text(changed.model_dump_json(exclude_defaults=True))
            await harness.app.reloader.reload()
            client = await harness.connect()
            for _ in range(2):
                await client.send("GET", "/health/live")
                assert (await client.answer()).status == 200
                await asyncio.sleep(0.6)
            client.close()


def test_unread_beyond_keep_alive_is_refused() -> None:
    with pytest.raises(ValidationError, match="unread_s must not be longer than keep_alive_s"):
        Timeouts(unread_s=6, keep_alive_s=5)
