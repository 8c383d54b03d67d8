"""Clients that do not read, or hardly, do not keep a place; those that are merely slow do."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import pytest
from gateway_harness import COMPLETION, Harness, eventually, gateway, settings_for
from mock_engine import Faults, MockEngine

from taut_service.http import client_rules

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
    async with (
        MockEngine(faults) as engine,
        gateway(settings_for(engine.url, timeouts=TIMES)) as harness,
    ):
        found = await narrow_client(harness, STREAM, b"connection: close\r\n")
        taken = await read_at(found, 250_000, 10)
        assert taken > 300 * 2000
        await eventually(lambda: engine.completed == 1)
        assert await harness.metric(SLOW_READER) == 0
        found.close()


async def test_pause_shorter_than_the_limit_costs_nothing() -> None:
    faults = Faults(tokens=300, token="t" * 2000)
    times = {"write_s": 2.0, "write_min_bytes_per_s": 1}
    async with (
        MockEngine(faults) as engine,
        gateway(settings_for(engine.url, timeouts=times)) as harness,
    ):
        found = await narrow_client(harness, STREAM, b"connection: close\r\n")
        await asyncio.sleep(1)
        assert await read_at(found, 1e9, 10) > 300 * 2000
        assert await harness.metric(SLOW_READER) == 0
        found.close()


@pytest.mark.parametrize("size", [110_000, 900_000])
@pytest.mark.parametrize("head", [b"", b"connection: close\r\n"], ids=["keep-alive", "close"])
async def test_what_is_left_of_an_answer_is_not_kept_for_ever(
    head: bytes, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_rules, "KEEP_ALIVE_S", 1.0)
    # Answered whole, the request has ended; the connection and its bytes have not.
    faults = Faults(tokens=1, token="t" * size)
    async with (
        MockEngine(faults) as engine,
        gateway(settings_for(engine.url, timeouts=TIMES)) as harness,
    ):
        for server in harness.server.servers:
            for listener in server.sockets:
                # Inherited: the kernel takes less than the answer.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
        found = await narrow_client(harness, COMPLETION, head)
        await eventually(lambda: engine.completed == 1)
        connections = harness.server.server_state.connections
        await eventually(lambda: harness.app.drain.live == 0)
        assert len(connections) == 1
        # An idle connection is closed then.
        await eventually(lambda: not connections, 8)
        assert await harness.metric(SLOW_READER) == 1
        found.close()
