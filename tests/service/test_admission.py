"""Bounded admission: as a class, and as a client meets it."""

from __future__ import annotations

import asyncio
import random

import pytest
from gateway_harness import COMPLETION, eventually, gateway, settings_for
from mock_engine import Faults, MockEngine

from taut_service.admission import AdmissionController
from taut_service.errors import OverloadedError
from taut_service.settings import AdmissionLimit


def controller(inflight: int, queued: int, timeout_s: float = 5.0) -> AdmissionController:
    return AdmissionController(
        AdmissionLimit(max_inflight=inflight, max_queued=queued, queue_timeout_s=timeout_s)
    )


async def test_waiters_are_admitted_in_order() -> None:
    admission = controller(1, 10)
    order: list[int] = []

    async def work(number: int) -> None:
        async with admission.slot():
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(work(number) for number in range(8)))
    assert order == list(range(8))
    assert (admission.inflight, admission.queued) == (0, 0)


async def test_full_queue_refuses_at_once() -> None:
    admission = controller(1, 1)
    await admission.acquire()
    waiting = asyncio.create_task(admission.acquire())
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError) as refused:
        await admission.acquire()
    assert refused.value.code == "queue_full"
    assert (refused.value.retry_after_s or 0) >= 1
    admission.release(0.1)
    await waiting
    assert admission.inflight == 1


async def test_wait_is_bounded() -> None:
    admission = controller(1, 1, 0.02)
    await admission.acquire()
    with pytest.raises(OverloadedError) as refused:
        await admission.acquire()
    assert refused.value.code == "queue_timeout"
    assert (admission.inflight, admission.queued) == (1, 0)


async def test_cancelled_waiter_leaves_the_queue() -> None:
    admission = controller(1, 5)
    await admission.acquire()
    waiting = asyncio.create_task(admission.acquire())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (admission.inflight, admission.queued) == (1, 0)


async def test_place_handed_to_a_waiter_cancelled_in_the_same_turn_is_not_lost() -> None:
    admission = controller(1, 5)
    await admission.acquire()
    waiting = asyncio.create_task(admission.acquire())
    await asyncio.sleep(0)
    admission.release(0.1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert admission.inflight == 0
    await admission.acquire()


async def test_slot_is_released_whatever_ends_the_block() -> None:
    admission = controller(2, 0)
    with pytest.raises(KeyError):
        async with admission.slot():
            raise KeyError
    assert admission.inflight == 0


async def test_retry_after_grows_with_the_queue_and_the_service_time() -> None:
    admission = controller(2, 100)
    for _ in range(200):
        await admission.acquire()
        admission.release(8.0)
    await admission.acquire()
    await admission.acquire()
    assert admission.retry_after_s() == pytest.approx(8.0 / 2)
    waiting = [asyncio.create_task(admission.acquire()) for _ in range(5)]
    await asyncio.sleep(0)
    assert admission.retry_after_s() == pytest.approx(8.0 * 6 / 2)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_bounds_hold_under_random_arrivals_departures_and_cancellations() -> None:
    randomness = random.Random(3)
    admission = controller(3, 4, 0.01)
    refused = 0

    async def visit() -> None:
        nonlocal refused
        try:
            async with admission.slot():
                assert 0 < admission.inflight <= 3
                assert 0 <= admission.queued <= 4
                await asyncio.sleep(randomness.random() * 0.01)
        except OverloadedError:
            refused += 1

    tasks = []
    for _ in range(400):
        tasks.append(asyncio.create_task(visit()))
        if randomness.random() < 0.3:
            randomness.choice(tasks).cancel()
        await asyncio.sleep(randomness.choice((0, 0, 0.001)))
    await asyncio.gather(*tasks, return_exceptions=True)
    assert refused > 0
    assert (admission.inflight, admission.queued) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_more_than_the_queue_holds_gets_429(stream: bool) -> None:
    admission = {"max_inflight": 2, "max_queued": 3}
    body = {**COMPLETION, "stream": stream}
    async with (
        MockEngine(Faults(latency_s=0.3)) as engine,
        gateway(settings_for(engine.url, admission=admission)) as harness,
    ):
        answers = await asyncio.gather(*(harness.post(body) for _ in range(10)))
        assert sorted(answer.status for answer in answers) == [200] * 5 + [429] * 5
        for answer in answers:
            if answer.status == 429:
                assert answer.error["type"] == "rate_limit_error"
                assert answer.error["code"] == "queue_full"
                assert int(answer.headers["retry-after"]) >= 1
        assert engine.started == 5
        assert await harness.metric('taut_rejected_total{reason="queue_full"}') == 5


async def test_wait_in_the_queue_ends_with_429() -> None:
    admission = {"max_inflight": 1, "max_queued": 3, "queue_timeout_s": 0.05}
    async with (
        MockEngine(Faults(latency_s=0.5)) as engine,
        gateway(settings_for(engine.url, admission=admission)) as harness,
    ):
        first = asyncio.create_task(harness.post(COMPLETION))
        await eventually(lambda: engine.running == 1)
        answer = await harness.post(COMPLETION)
        assert (answer.status, answer.error["code"]) == (429, "queue_timeout")
        assert (await first).status == 200
        assert engine.started == 1
