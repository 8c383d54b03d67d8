"""A request that ends badly is gone at once, its body too, without the collector's help."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable, Iterator

import pytest
from gateway_harness import COMPLETION, Harness, eventually, gateway, settings_for
from mock_engine import Faults, MockEngine

from taut_service.call import Call
from taut_service.http.request_watch import RequestWatch
from taut_service.worker.outgoing import Outgoing

STREAM = {**COMPLETION, "stream": True}
Scenario = Callable[[Harness, MockEngine], Awaitable[None]]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def leaves(harness: Harness, engine: MockEngine) -> None:
    engine.faults = Faults(latency_s=30)
    client = await harness.connect()
    await client.send("POST", "/v1/completions", json.dumps(COMPLETION).encode())
    await eventually(lambda: engine.running == 1)
    client.close()


async def leaves_within_a_stream(harness: Harness, engine: MockEngine) -> None:
    engine.faults = Faults(tokens=1000, interval_s=0.01)
    client = await harness.connect()
    await client.send("POST", "/v1/completions", json.dumps(STREAM).encode())
    await client.reader.readuntil(b"data: ")
    client.close()


async def leaves_with_requests_ahead(harness: Harness, engine: MockEngine) -> None:
    engine.faults = Faults(latency_s=30)
    client = await harness.connect()
    for _ in range(3):
        await client.send("POST", "/v1/completions", json.dumps(COMPLETION).encode())
    await eventually(lambda: engine.running == 1)
    client.close()


async def leaves_within_its_body(harness: Harness, _: MockEngine) -> None:
    client = await harness.connect()
    client.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 9\r\n\r\n{")
    await eventually(lambda: harness.app.drain.live == 1)
    client.close()


async def runs_out_of_time(harness: Harness, engine: MockEngine) -> None:
    engine.faults = Faults(latency_s=30)
    assert (await harness.post(COMPLETION, x_request_timeout="0.1")).status == 504


async def loses_its_worker(harness: Harness, engine: MockEngine) -> None:
    engine.faults = Faults(reset=True)
    assert (await harness.post(COMPLETION)).status == 502


async def loses_its_worker_within_a_stream(harness: Harness, engine: MockEngine) -> None:
    engine.faults = Faults(kill_at_byte=400)
    await harness.post(STREAM)


async def gets_no_http(harness: Harness, engine: MockEngine) -> None:
    engine.faults = Faults(raw=b"GARBAGE\r\n\r\n")
    assert (await harness.post(COMPLETION)).status == 502


async def is_silent(harness: Harness, engine: MockEngine) -> None:
    engine.faults = Faults(latency_s=30)
    assert (await harness.post(COMPLETION)).status == 504


async def is_wrong(harness: Harness, _: MockEngine) -> None:
    assert (await harness.post({**COMPLETION, "max_tokens": -1})).status == 400


@pytest.mark.parametrize(
    "scenario",
    [
        leaves,
        leaves_within_a_stream,
        leaves_with_requests_ahead,
        leaves_within_its_body,
        runs_out_of_time,
        loses_its_worker,
        loses_its_worker_within_a_stream,
        gets_no_http,
        is_silent,
        is_wrong,
    ],
)
@pytest.mark.usefixtures("no_collector")
async def test_nothing_of_it_waits_for_the_collector(
    scenario: Scenario, caplog: pytest.LogCaptureFixture
) -> None:
    times = {"first_byte_s": 0.5 if scenario is is_silent else 20}
    async with (
        MockEngine() as engine,
        gateway(settings_for(engine.url, timeouts=times)) as harness,
    ):
        for _ in range(2):
            await scenario(harness, engine)
            await eventually(lambda: harness.app.drain.live == 0)
            await eventually(lambda: engine.running == 0)
        await asyncio.sleep(0.05)
        kinds = (Call, Outgoing, RequestWatch)
        left = [type(found).__name__ for found in gc.get_objects() if isinstance(found, kinds)]
        assert left == []
        assert "ASGI callable" not in caplog.text
        assert "never retrieved" not in caplog.text
