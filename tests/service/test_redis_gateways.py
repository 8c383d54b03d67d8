"""Gateways that share their rate limits through a real Redis, and its death."""

from __future__ import annotations

import hashlib
from pathlib import Path

from gateway_harness import COMPLETION, Harness, eventually, gateway, settings_for
from mock_engine import MockEngine
from redis_process import RedisServer, redis_server

from taut_service.config.settings import RateLimits, Settings

KEYS = [{"name": "a", "sha256": hashlib.sha256(b"k").hexdigest(), "requests_per_minute": 4}]


def shared_settings(engine: MockEngine, server: RedisServer, on_failure: str) -> Settings:
    redis = server.settings(on_failure=on_failure)
    limits = RateLimits.model_construct(store="redis", redis=redis)
    return settings_for(engine.url, api_keys=KEYS).model_copy(update={"rate_limits": limits})


async def statuses(harness: Harness, count: int) -> list[int]:
    answers = [await harness.post(COMPLETION, authorization="Bearer k") for _ in range(count)]
    return [answer.status for answer in answers]


async def test_two_gateways_on_one_redis_through_its_death(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, MockEngine() as engine:
        settings = shared_settings(engine, server, "open")
        async with gateway(settings) as first, gateway(settings) as second:
            for harness in (first, second):
                await eventually(lambda h=harness: up_of(h))
            assert await statuses(first, 2) == [200] * 2
            assert await statuses(second, 3) == [200, 200, 429]
            assert await statuses(first, 1) == [429]
            server.kill()
            assert await statuses(first, 6) == [200] * 6
            assert await first.metric("taut_limit_store_up") == 0
            assert await first.metric("taut_limit_store_losses_total") == 1
            await server.start()
            await eventually(lambda: up_of(first))
            assert (await statuses(first, 6)).count(429) >= 1


async def up_of(harness: Harness) -> bool:
    return await harness.metric("taut_limit_store_up") == 1


async def test_closed_mode_refuses_while_redis_is_away(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, MockEngine() as engine:
        settings = shared_settings(engine, server, "closed")
        async with gateway(settings) as harness:
            await eventually(lambda: up_of(harness))
            server.kill()
            answer = await harness.post(COMPLETION, authorization="Bearer k")
            assert (answer.status, answer.error["code"]) == (503, "rate_limits_unavailable")
            assert answer.headers["retry-after"] == "1"
            assert engine.started == 0
            await server.start()
            await eventually(lambda: up_of(harness))
            assert await statuses(harness, 1) == [200]
