"""Ten times what the workers can do: they stay busy, the rest is told to come back, nothing grows.

In one process and for a second or two; ``test_faults_*`` does it with processes.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from gateway_harness import COMPLETION, MODEL, Harness, eventually, gateway, settings_for
from mock_engine import Faults, MockEngine

from taut_service.config.settings import Settings

PLACES = 8
SERVICE_S = 0.4
CAPACITY_PER_S = PLACES / SERVICE_S
SECONDS = 3.0


def key(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **fields}


async def offer(
    harness: Harness,
    per_s: float,
    seconds: float,
    name: str,
    seen: Counter[tuple[str, int]],
    look: Callable[[], None] = lambda: None,
) -> list[int]:
    """Send at a steady rate, whatever comes back; return every Retry-After.

    What a machine that stood still has missed is not made up for: the burst would be another load
    than the one that is asked for.
    """
    advice: list[int] = []

    async def one() -> None:
        answer = await harness.post(COMPLETION, authorization=f"Bearer {name}")
        seen[name, answer.status] += 1
        if answer.status == 429:
            assert answer.error["code"] == "queue_full"
            advice.append(int(answer.headers["retry-after"]))

    tasks = []
    for _ in range(int(per_s * seconds)):
        tasks.append(asyncio.create_task(one()))
        await asyncio.sleep(1 / per_s)
        look()
    await asyncio.gather(*tasks)
    return advice


async def test_ten_times_the_capacity_loses_no_goodput() -> None:
    admission = {"max_inflight": PLACES, "max_queued": 16}
    async with (
        MockEngine(Faults(latency_s=SERVICE_S)) as engine,
        gateway(settings_for(engine.url, admission=admission)) as harness,
    ):
        seen: Counter[tuple[str, int]] = Counter()
        taken: list[int] = []
        rate = 10 * CAPACITY_PER_S
        advice = await offer(harness, rate, SECONDS, "", seen, lambda: taken.append(engine.running))
        assert {status for _, status in seen} == {200, 429}
        # Each place gives an answer every SERVICE_S: goodput is how many are taken, and that is
        # the same on a machine that stands still meanwhile.
        assert statistics.fmean(taken) >= 0.9 * PLACES
        assert engine.started == engine.completed == seen["", 200]
        assert all(1 <= after_s <= 5 for after_s in advice)
        controller = harness.app.reloader._admission.of(MODEL)
        assert (controller.inflight, controller.inflight_tokens, controller.queued) == (0, 0, 0)


async def test_flood_by_one_key_leaves_another_its_share() -> None:
    admission = {"max_inflight": PLACES, "max_queued": 16}
    keys = [key("flood"), key("quiet")]
    async with (
        MockEngine(Faults(latency_s=SERVICE_S)) as engine,
        gateway(settings_for(engine.url, admission=admission, api_keys=keys)) as harness,
    ):
        seen: Counter[tuple[str, int]] = Counter()
        await asyncio.gather(
            offer(harness, 8 * CAPACITY_PER_S, SECONDS, "flood", seen),
            offer(harness, 0.25 * CAPACITY_PER_S, SECONDS, "quiet", seen),
        )
        asked = int(0.25 * CAPACITY_PER_S * SECONDS)
        # Half of the places is its to have, and the flood never takes it.
        assert seen["quiet", 200] >= asked - 1
        assert seen["flood", 429] > seen["flood", 200] > 0


async def test_low_priority_gives_way() -> None:
    admission = {"max_inflight": PLACES, "max_queued": 16}
    keys = [key("high", priority="high"), key("low", priority="low")]
    async with (
        MockEngine(Faults(latency_s=SERVICE_S)) as engine,
        gateway(settings_for(engine.url, admission=admission, api_keys=keys)) as harness,
    ):
        seen: Counter[tuple[str, int]] = Counter()
        await asyncio.gather(
            offer(harness, 3 * CAPACITY_PER_S, SECONDS, "high", seen),
            offer(harness, 3 * CAPACITY_PER_S, SECONDS, "low", seen),
        )
        assert seen["high", 200] > 3 * seen["low", 200]


async def test_memory_is_flat_under_overload() -> None:
    """What a request leaves behind is nothing: objects are counted, pages would be noise."""
    admission = {"max_inflight": 2, "max_queued": 4}
    keys = [key("a", requests_per_minute=100_000, tokens_per_minute=10_000_000)]
    async with (
        MockEngine(Faults(latency_s=0.05)) as engine,
        gateway(settings_for(engine.url, admission=admission, api_keys=keys)) as harness,
    ):

        async def overload() -> int:
            seen: Counter[tuple[str, int]] = Counter()
            await offer(harness, 500, 1.0, "a", seen)
            assert seen["a", 429] > 0
            engine.seen.clear()
            await eventually(lambda: not harness.server.server_state.connections)
            gc.collect()
            return len(gc.get_objects())

        await overload()
        before = await overload()
        after = await overload()
        assert after - before < 200


BROWN_OUT = {"from": "large", "to": "small", "at_queue_fraction": 0.5, "until_queue_fraction": 0.2}


@pytest.mark.parametrize(
    ("allowed", "headers", "expected"),
    [
        (True, {}, {"large", "small"}),
        (False, {}, {"large"}),
        (True, {"x-taut-variant": "large"}, {"large"}),
    ],
)
async def test_brown_out_moves_keys_that_allow_it(
    allowed: bool, headers: dict[str, str], expected: set[str]
) -> None:
    keys = [key("a", brown_out=allowed, scopes=["inference", "variant:pin"])]
    async with (
        MockEngine(Faults(latency_s=0.05)) as large,
        MockEngine(Faults(latency_s=0.05)) as small,
    ):
        model = {
            "name": MODEL,
            "max_model_len": 64,
            "brown_out": BROWN_OUT,
            "variants": [
                {"name": "large", "weight": 1, "workers": [{"name": "w-l", "url": large.url}]},
                {"name": "small", "weight": 0, "workers": [{"name": "w-s", "url": small.url}]},
            ],
        }
        settings = Settings.model_validate(
            {
                "models": [model],
                "api_keys": keys,
                "admission": {"max_inflight": 2, "max_queued": 20},
            }
        )
        async with gateway(settings) as harness:
            calm = await harness.post(COMPLETION, authorization="Bearer a", **headers)
            assert calm.headers["x-taut-variant"] == "large"
            answers = await asyncio.gather(
                *(harness.post(COMPLETION, authorization="Bearer a", **headers) for _ in range(20))
            )
            assert {answer.status for answer in answers} == {200}
            assert {answer.headers["x-taut-variant"] for answer in answers} == expected
            calm = await harness.post(COMPLETION, authorization="Bearer a", **headers)
            assert calm.headers["x-taut-variant"] == "large"
