"""A client that leaves: the worker is told at once, and nothing stays counted."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from gateway_harness import CHAT, COMPLETION, Harness, eventually, gateway, settings_for
from mock_engine import Faults, MockEngine

SLOW = Faults(tokens=1000, interval_s=0.01)


async def all_zero(harness: Harness) -> bool:
    names = ("taut_inflight_requests", "taut_queued_requests")
    values = [await harness.metric(name) for name in names]
    values.append(await harness.metric('taut_worker_outstanding_requests{worker="w0"}'))
    return values == [0, 0, 0] and harness.app.drain.live == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
async def test_leaving_client_ends_the_generation(
    path: str, body: dict[str, object], stream: bool
) -> None:
    async with MockEngine(SLOW) as engine, gateway(settings_for(engine.url)) as harness:
        client = await harness.connect()
        await client.send("POST", path, json.dumps({**body, "stream": stream}).encode())
        await eventually(lambda: engine.running == 1)
        if stream:
            await client.reader.readuntil(b"data: ")
        client.close()
        # A whole generation takes ten seconds; the target is 0.1 s, the rest is room for others.
        assert await eventually(lambda: engine.aborted == 1) < 1
        await eventually(lambda: all_zero(harness))
        route = "completions" if path == "/v1/completions" else "chat_completions"
        assert await harness.metric(f'taut_disconnects_total{{model="m",route="{route}"}}') == 1
        assert engine.completed == 0
        await eventually(lambda: '"status":499' in harness.log.getvalue())


async def test_client_that_leaves_the_queue_never_reaches_the_worker() -> None:
    admission = {"max_inflight": 1, "max_queued": 5}
    async with (
        MockEngine(SLOW) as engine,
        gateway(settings_for(engine.url, admission=admission)) as harness,
    ):
        first, second = await harness.connect(), await harness.connect()
        await first.send("POST", "/v1/completions", json.dumps(COMPLETION).encode())
        await eventually(lambda: engine.running == 1)
        await second.send("POST", "/v1/completions", json.dumps(COMPLETION).encode())
        await eventually(lambda: queued(harness, 1))
        second.close()
        await eventually(lambda: queued(harness, 0))
        first.close()
        await eventually(lambda: all_zero(harness))
        assert engine.started == 1


async def queued(harness: Harness, count: int) -> bool:
    return await harness.metric("taut_queued_requests") == count


async def test_client_that_leaves_within_its_body_is_forgotten() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        client = await harness.connect()
        client.writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 9\r\n\r\n{"
        )
        await eventually(lambda: harness.app.drain.live == 1)
        client.close()
        await eventually(lambda: all_zero(harness))
        assert engine.started == 0


async def test_counters_return_to_zero_after_500_random_disconnects() -> None:
    randomness = random.Random(7)
    admission = {"max_inflight": 20, "max_queued": 30, "queue_timeout_s": 0.05}
    faults = Faults(tokens=40, interval_s=0.002, latency_s=0.005)
    async with (
        MockEngine(faults) as engine,
        gateway(settings_for(engine.url, admission=admission)) as harness,
    ):

        async def come_and_go(delay_s: float, stream: bool) -> None:
            client = await harness.connect()
            body = {**COMPLETION, "stream": stream}
            await client.send("POST", "/v1/completions", json.dumps(body).encode())
            await asyncio.sleep(delay_s)
            client.close()

        for _ in range(10):
            await asyncio.gather(
                *(
                    come_and_go(randomness.choice((0, randomness.random() * 0.1)), i % 2 == 0)
                    for i in range(50)
                )
            )
        await eventually(lambda: all_zero(harness), 10)
        await eventually(lambda: engine.running == 0)
        assert engine.aborted > 50
        # The places are really free: a full house of requests is served at once.
        faults.tokens = 2
        answers = await asyncio.gather(*(harness.post(COMPLETION) for _ in range(20)))
        assert [answer.status for answer in answers] == [200] * 20
