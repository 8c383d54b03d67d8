"""A key has so many requests under way and no more; nobody else is bounded by that."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import pytest
from gateway_harness import COMPLETION, Client, Harness, eventually, gateway, settings_for
from mock_engine import Faults, MockEngine

SLOW = Faults(latency_s=30)


def key(name: str, **rest: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **rest}


async def begin(harness: Harness, name: str, body: bytes = b"") -> Client:
    client = await harness.connect()
    headers = {"authorization": f"Bearer {name}"}
    await client.send("POST", "/v1/completions", body or json.dumps(COMPLETION).encode(), headers)
    return client


async def test_key_has_no_more_requests_under_way_than_it_may() -> None:
    keys = [key("bounded", max_inflight=2), key("free")]
    async with (
        MockEngine(SLOW) as engine,
        gateway(settings_for(engine.url, api_keys=keys)) as harness,
    ):
        clients = [await begin(harness, "bounded") for _ in range(2)]
        await eventually(lambda: engine.running == 2)
        third = await begin(harness, "bounded")
        answer = await third.answer()
        assert (answer.status, answer.error["code"]) == (429, "key_inflight_limit")
        assert answer.error["type"] == "rate_limit_error"
        assert "2 requests under way" in answer.error["message"]
        assert answer.headers["retry-after"] == "1"
        assert await harness.metric('taut_rejected_total{reason="key_inflight"}') == 1
        clients += [await begin(harness, "free") for _ in range(3)]
        await eventually(lambda: engine.running == 5)
        clients[0].close()
        await eventually(lambda: engine.aborted == 1)
        engine.faults = Faults()
        assert (await harness.post(COMPLETION, authorization="Bearer bounded")).status == 200
        for client in (*clients, third):
            client.close()


@pytest.mark.parametrize("body", [b"{", b'{"model":"nope"}', json.dumps(COMPLETION).encode()])
async def test_place_is_free_again_however_the_request_ends(body: bytes) -> None:
    keys = [key("bounded", max_inflight=1)]
    async with MockEngine() as engine, gateway(settings_for(engine.url, api_keys=keys)) as harness:
        for _ in range(3):
            answer = await harness.post(body, authorization="Bearer bounded")
            assert answer.status != 429
        engine.faults = Faults(reset=True)
        assert (await harness.post(COMPLETION, authorization="Bearer bounded")).status == 502
        engine.faults = Faults()
        assert (await harness.post(COMPLETION, authorization="Bearer bounded")).status == 200


async def test_requests_that_still_send_their_body_count() -> None:
    keys = [key("bounded", max_inflight=1)]
    async with MockEngine() as engine, gateway(settings_for(engine.url, api_keys=keys)) as harness:
        sender = await harness.connect()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\nauthorization: Bearer bounded\r\n"
        sender.writer.write(head + b"content-length: 1000\r\n\r\n{")
        await eventually(lambda: harness.app.drain.live == 1)
        answer = await harness.post(COMPLETION, authorization="Bearer bounded")
        assert answer.status == 429
        sender.close()
        await eventually(lambda: harness.app.drain.live == 0)
        assert (await harness.post(COMPLETION, authorization="Bearer bounded")).status == 200


async def test_without_keys_there_is_no_such_bound() -> None:
    async with MockEngine(SLOW) as engine, gateway(settings_for(engine.url)) as harness:
        clients = [await begin(harness, "anybody") for _ in range(20)]
        await eventually(lambda: engine.running == 20)
        for client in clients:
            client.close()
        await asyncio.sleep(0)
