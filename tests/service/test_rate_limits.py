"""Requests and tokens a minute: the arithmetic, the estimate, and what a client sees."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import pytest
from gateway_harness import (
    CHAT,
    COMPLETION,
    Answer,
    Client,
    Harness,
    eventually,
    gateway,
    settings_for,
)
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from mock_engine import Faults, MockEngine

from taut_service.admit.limits.bucket import RateLimit
from taut_service.admit.limits.estimate import Estimate
from taut_service.admit.limits.limiter import RateLimiter, duration
from taut_service.admit.limits.memory import SWEEP_AT, MemoryLimitStore
from taut_service.errors import RateLimitedError, RequestError

PROMPT = 2
"""Estimate of the prompt of COMPLETION: five bytes."""
USED = 5 + 4
"""What the mock engine says it used: five tokens in, four out."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def limiter(clock: Clock, counted: list[str] | None = None) -> RateLimiter:
    return RateLimiter(MemoryLimitStore(clock), [].append if counted is None else counted.append)


async def test_requests_of_a_minute_are_counted_and_come_back_evenly() -> None:
    clock, counted = Clock(), list[str]()
    limits, limit = limiter(clock, counted), RateLimit(6, None)
    for _ in range(6):
        await limits.reserve("a", limit, Estimate(1, 1))
    with pytest.raises(RateLimitedError) as refused:
        await limits.reserve("a", limit, Estimate(1, 1))
    assert refused.value.retry_after_s == pytest.approx(10)
    assert counted == ["requests"]
    clock.now += 9.9
    with pytest.raises(RateLimitedError):
        await limits.reserve("a", limit, Estimate(1, 1))
    clock.now += 0.2
    await limits.reserve("a", limit, Estimate(1, 1))
    # Another caller has its own.
    await limits.reserve("b", limit, Estimate(1, 1))


async def test_tokens_are_reserved_and_settled() -> None:
    clock = Clock()
    limits, limit = limiter(clock), RateLimit(None, 600)
    first = await limits.reserve("a", limit, Estimate(100, 400))
    with pytest.raises(RateLimitedError) as refused:
        await limits.reserve("a", limit, Estimate(100, 100))
    # A hundred are left, ten come a second.
    assert refused.value.retry_after_s == pytest.approx(10)
    first.settle(150)
    first.settle(0)
    await limits.reserve("a", limit, Estimate(100, 100))
    standing = (await limits.reserve("a", limit, Estimate(1, 0))).standing
    assert standing is not None
    assert standing.tokens == pytest.approx(600 - 150 - 200 - 1)


async def test_more_than_reserved_becomes_a_debt_of_a_minute_at_most() -> None:
    clock = Clock()
    limits, limit = limiter(clock), RateLimit(None, 600)
    (await limits.reserve("a", limit, Estimate(10, 10))).settle(10**12)
    with pytest.raises(RateLimitedError) as refused:
        await limits.reserve("a", limit, Estimate(1, 0))
    assert refused.value.retry_after_s == pytest.approx(60.1)
    clock.now += 60.2
    await limits.reserve("a", limit, Estimate(1, 0))


async def test_cancelled_reservation_leaves_no_trace() -> None:
    limits, limit = limiter(Clock()), RateLimit(1, 100)
    for _ in range(3):
        (await limits.reserve("a", limit, Estimate(50, 50))).cancel()


async def test_request_that_can_never_pass_is_told_so() -> None:
    counted: list[str] = []
    limits = limiter(Clock(), counted)
    with pytest.raises(RequestError) as refused:
        await limits.reserve("a", RateLimit(None, 100), Estimate(50, 51))
    assert (refused.value.status, refused.value.code) == (400, "request_exceeds_rate_limit")
    assert "about 101 tokens" in refused.value.message
    assert counted == ["tokens"]


@hypothesis_settings(max_examples=200, deadline=None, derandomize=True)
@given(
    rpm=st.integers(1, 50),
    tpm=st.integers(10, 1000),
    steps=st.lists(
        st.tuples(st.floats(0, 20), st.integers(1, 9), st.integers(0, 30), st.booleans()),
        max_size=80,
    ),
)
async def test_no_minute_sees_more_than_twice_the_limit(
    rpm: int, tpm: int, steps: list[tuple[float, int, int, bool]]
) -> None:
    clock = Clock()
    limits, limit = limiter(clock), RateLimit(rpm, tpm)
    granted: list[tuple[float, int]] = []
    for pause_s, tokens, used, cancelled in steps:
        clock.now += pause_s
        try:
            taken = await limits.reserve("a", limit, Estimate(tokens, 0))
        except RateLimitedError as error:
            assert 0 < (error.retry_after_s or 0) <= 120
            clock.now += error.retry_after_s or 0
            # What is promised is kept.
            taken = await limits.reserve("a", limit, Estimate(tokens, 0))
        if cancelled:
            taken.cancel()
        else:
            taken.settle(used)
            granted.append((clock.now, used))
    for start, _ in granted:
        window = [used for at, used in granted if start <= at < start + 60]
        assert len(window) <= 2 * rpm
        # The last one may have used more than it reserved.
        assert sum(window) <= 2 * tpm + 30


async def test_callers_of_the_past_are_forgotten() -> None:
    clock = Clock()
    store = MemoryLimitStore(clock)
    for i in range(5 * SWEEP_AT):
        clock.now += 0.5
        await store.take(f"caller-{i}", RateLimit(1, 1), 1)
    assert len(store) <= 2 * SWEEP_AT


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.017, "17ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.9996, "1m0s"),
        (360, "6m0s"),
        (61.25, "1m1.25s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def limited(**limits: int) -> list[dict[str, Any]]:
    return [{"name": "a", "sha256": hashlib.sha256(b"k").hexdigest(), **limits}]


async def post(harness: Harness, body: dict[str, Any] | None = None) -> Answer:
    return await harness.post(body or COMPLETION, authorization="Bearer k")


def remaining(answer: Answer) -> int:
    return int(answer.headers["x-ratelimit-remaining-tokens"])


async def test_client_sees_where_it_stands() -> None:
    keys = limited(requests_per_minute=2, tokens_per_minute=100)
    async with (
        MockEngine() as engine,
        gateway(settings_for(engine.url, api_keys=keys)) as harness,
    ):
        first = await post(harness)
        assert first.status == 200
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"] in ("30s", "29.999s")
        assert first.headers["x-ratelimit-limit-tokens"] == "100"
        assert remaining(first) == 100 - PROMPT - 8
        second = await post(harness)
        assert second.status == 200
        # The first was settled with what it used.
        assert 100 - USED - PROMPT - 8 <= remaining(second) <= 100 - USED - PROMPT - 8 + 1
        third = await post(harness)
        assert (third.status, third.error["code"]) == (429, "rate_limit_exceeded")
        assert third.error["type"] == "rate_limit_error"
        assert "2 requests a minute" in third.error["message"]
        assert 28 <= int(third.headers["retry-after"]) <= 30
        assert third.headers["x-ratelimit-remaining-requests"] == "0"
        assert engine.started == 2
        assert await harness.metric('taut_rate_limited_total{limit="requests"}') == 1
        assert await harness.metric('taut_rejected_total{reason="rate_limited"}') == 1


async def test_caller_without_limits_gets_no_headers() -> None:
    async with (
        MockEngine() as engine,
        gateway(settings_for(engine.url, api_keys=limited())) as harness,
    ):
        answer = await post(harness)
        assert answer.status == 200
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


async def used_by(faults: Faults, body: dict[str, Any], *, leave_after: int | None = None) -> int:
    """Return what one request was charged, asked through the headers of a second."""
    keys = limited(tokens_per_minute=200)
    async with (
        MockEngine(faults) as engine,
        gateway(settings_for(engine.url, api_keys=keys)) as harness,
    ):
        if leave_after is None:
            await post(harness, body)
        else:
            await leave(await harness.connect(), body, leave_after)
            await eventually(lambda: engine.running == 0)
        faults.status, faults.kill_at_byte, faults.latency_s = 200, None, 0.0
        faults.interval_s = 0.0
        second = await post(harness)
        assert second.status == 200
        # Rounded up: buckets fill while the test runs.
        return 200 - remaining(second) - PROMPT - 8


async def leave(client: Client, body: dict[str, Any], events: int) -> None:
    await client.send(
        "POST", "/v1/completions", json.dumps(body).encode(), {"authorization": "Bearer k"}
    )
    if events:
        await client.head()
        seen = 0
        async for chunk in client.chunks():
            seen += chunk.count(b"data:")
            if seen >= events:
                break
    else:
        await asyncio.sleep(0.2)
    client.close()


STREAM = {**COMPLETION, "stream": True, "max_tokens": 60}
WITH_USAGE = {**STREAM, "stream_options": {"include_usage": True}}


async def test_whole_answer_is_charged_what_the_worker_counted() -> None:
    assert await used_by(Faults(), {**COMPLETION, "max_tokens": 60}) in (USED, USED - 1)


async def test_stream_with_usage_is_charged_what_the_worker_counted() -> None:
    assert await used_by(Faults(), WITH_USAGE) in (USED, USED - 1)


async def test_stream_without_usage_is_charged_its_events() -> None:
    charged = await used_by(Faults(tokens=20, counts_streams=False), STREAM)
    # Twenty tokens and the terminating event.
    assert PROMPT + 20 - 1 <= charged <= PROMPT + 22


async def test_stream_that_its_client_leaves_is_charged_what_was_counted() -> None:
    charged = await used_by(Faults(tokens=60, interval_s=0.02), STREAM, leave_after=5)
    assert PROMPT + 4 <= charged <= PROMPT + 12


async def test_document_that_its_client_leaves_is_charged_what_was_reserved() -> None:
    body = {**COMPLETION, "max_tokens": 60}
    charged = await used_by(Faults(latency_s=30), body, leave_after=0)
    assert PROMPT + 60 - 4 <= charged <= PROMPT + 60


async def test_what_a_worker_refused_costs_no_tokens() -> None:
    assert await used_by(Faults(status=422), {**COMPLETION, "max_tokens": 60}) in (0, -1)


async def test_what_no_worker_could_answer_costs_nothing() -> None:
    assert await used_by(Faults(status=500), {**COMPLETION, "max_tokens": 60}) in (0, -1)


async def test_refusal_by_admission_gives_everything_back() -> None:
    keys = limited(requests_per_minute=4)
    admission = {"max_inflight": 1, "max_queued": 0}
    async with (
        MockEngine(Faults(latency_s=0.5)) as engine,
        gateway(settings_for(engine.url, api_keys=keys, admission=admission)) as harness,
    ):
        first = asyncio.create_task(post(harness))
        await eventually(lambda: engine.running == 1)
        for _ in range(5):
            refused = await post(harness)
            assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert (await first).status == 200
        assert (await post(harness)).headers["x-ratelimit-remaining-requests"] == "2"


async def test_request_larger_than_the_limit_is_a_400() -> None:
    keys = limited(tokens_per_minute=20)
    async with (
        MockEngine() as engine,
        gateway(settings_for(engine.url, api_keys=keys)) as harness,
    ):
        answer = await harness.post(
            {**CHAT, "max_tokens": 60}, "/v1/chat/completions", authorization="Bearer k"
        )
        assert (answer.status, answer.error["code"]) == (400, "request_exceeds_rate_limit")
        assert engine.started == 0
