"""A client that leaves is noticed whatever it has sent: bodies of any size, requests ahead."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

import pytest
from gateway_harness import COMPLETION, Client, Harness, eventually, gateway, settings_for
from mock_engine import Faults, MockEngine

KIB = 1024
SIZES = (KIB, 64 * KIB, 256 * KIB - 1, 256 * KIB, 256 * KIB + 1, 1024 * KIB, 4096 * KIB - KIB)
LIMITS = {"max_body_bytes": 4096 * KIB}
PROMPT = b'{"model":"m","prompt":"a"}'
AHEAD = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n%b" % (
    len(PROMPT),
    PROMPT,
)
NOTICED_S = 2.0


def body_of(size: int, stream: bool) -> bytes:
    """A request of exactly ``size`` bytes."""
    document = {**COMPLETION, "stream": stream, "user": ""}
    document["user"] = "u" * (size - len(json.dumps(document).encode()))
    return json.dumps(document).encode()


def leave(client: Client, how: str) -> None:
    if how == "reset":
        bound: Any = client.writer.get_extra_info("socket")
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


async def check_left(harness: Harness, engine: MockEngine, client: Client, how: str) -> None:
    leave(client, how)
    await eventually(lambda: engine.aborted == 1, NOTICED_S)
    await eventually(lambda: harness.app.drain.live == 0, NOTICED_S)
    assert await harness.metric("taut_inflight_requests") == 0
    assert engine.completed == 0
    await eventually(lambda: len(harness.server.server_state.connections) == 0, NOTICED_S)


@pytest.mark.parametrize("ahead", [0, 1, 3], ids=lambda n: f"{n}-ahead")
@pytest.mark.parametrize("when", ["before the answer", "within the answer"])
@pytest.mark.parametrize("size", SIZES)
async def test_client_that_leaves_is_noticed(size: int, when: str, ahead: int) -> None:
    # A whole answer has no first byte before its end: "within" is a stream then.
    stream = when == "within the answer"
    faults = Faults(tokens=1000, interval_s=0.01) if stream else Faults(latency_s=30)
    async with (
        MockEngine(faults) as engine,
        gateway(settings_for(engine.url, limits=LIMITS)) as harness,
    ):
        client = await harness.connect()
        await client.send("POST", "/v1/completions", body_of(size, stream))
        client.writer.write(AHEAD * ahead)
        await client.writer.drain()
        await eventually(lambda: engine.running == 1)
        if stream:
            await client.reader.readuntil(b"data: ")
        await asyncio.sleep(0.05)
        await check_left(harness, engine, client, "close")
        assert engine.started == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_large_body_and_a_flood_ahead_do_not_hide_the_end(how: str, stream: bool) -> None:
    async with (
        MockEngine(Faults(latency_s=30)) as engine,
        gateway(settings_for(engine.url, limits=LIMITS)) as harness,
    ):
        client = await harness.connect()
        await client.send("POST", "/v1/completions", body_of(1024 * KIB, stream))
        # More than is read ahead: the end waits behind it in the kernel.
        client.writer.write(AHEAD * 20)
        client.writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 3000000\r\n"
        )
        client.writer.write(b"\r\n" + b"x" * 1024 * KIB)
        await eventually(lambda: engine.running == 1)
        await asyncio.sleep(0.05)
        await check_left(harness, engine, client, how)


async def test_requests_ahead_with_large_bodies_are_answered_in_order() -> None:
    bodies = [body_of(size, False) for size in (KIB, 300 * KIB, 1024 * KIB, KIB)]
    async with (
        MockEngine(Faults(latency_s=0.05)) as engine,
        gateway(settings_for(engine.url, limits=LIMITS)) as harness,
    ):
        client = await harness.connect()
        sending = asyncio.gather(*(client.send("POST", "/v1/completions", b) for b in bodies))
        for _ in bodies:
            assert (await client.answer()).status == 200
        await sending
        assert [seen.body for seen in engine.seen if len(seen.body) > 500] == bodies
        client.close()


async def test_places_of_clients_that_left_are_free() -> None:
    admission = {"max_inflight": 8, "queue_timeout_s": 5}
    async with (
        MockEngine(Faults(latency_s=30)) as engine,
        gateway(settings_for(engine.url, limits=LIMITS, admission=admission)) as harness,
    ):
        clients = [await harness.connect() for _ in range(8)]
        for client in clients:
            await client.send("POST", "/v1/completions", body_of(300 * KIB, False))
        await eventually(lambda: engine.running == 8)
        for client in clients:
            client.close()
        await eventually(lambda: engine.aborted == 8, NOTICED_S)
        engine.faults = Faults()
        assert (await harness.post(COMPLETION)).status == 200
