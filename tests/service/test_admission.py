"""Bounded admission: as a class, and as a client meets it."""

from __future__ import annotations

import asyncio
import random

import pytest
from gateway_harness import COMPLETION, eventually, gateway, settings_for
from mock_engine import Faults, MockEngine

from taut_service.admit.admission import Admission, AdmissionController, Claim
from taut_service.config.settings import AdmissionLimit, BrownOut, Settings
from taut_service.errors import OverloadedError


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


async def test_newcomer_does_not_overtake_a_head_that_does_not_fit() -> None:
    limit = AdmissionLimit(max_inflight=9, max_inflight_tokens=10)
    admission = AdmissionController(limit)
    held = await admission.acquire(Claim(tokens=6))
    large = asyncio.create_task(admission.acquire(Claim(tokens=8)))
    await asyncio.sleep(0)
    small = asyncio.create_task(admission.acquire(Claim(tokens=2)))
    await asyncio.sleep(0)
    assert (admission.inflight, admission.inflight_tokens, admission.queued) == (1, 6, 2)
    admission.release(0.1, held)
    assert await large == 8
    assert await small == 2
    assert (admission.inflight_tokens, admission.queued) == (10, 0)


async def test_request_larger_than_all_tokens_runs_alone() -> None:
    limit = AdmissionLimit(max_inflight=9, max_inflight_tokens=10)
    admission = AdmissionController(limit)
    assert await admission.acquire(Claim(tokens=1000)) == 10
    small = asyncio.create_task(admission.acquire(Claim(tokens=1)))
    await asyncio.sleep(0)
    assert admission.queued == 1
    admission.release(0.1, 10)
    assert await small == 1


async def test_better_claim_pushes_out_a_waiter_of_a_full_queue() -> None:
    admission = controller(1, 2)
    await admission.acquire()
    flood = [asyncio.create_task(admission.acquire(Claim(10, "flood"))) for _ in range(2)]
    await asyncio.sleep(0)
    quiet = asyncio.create_task(admission.acquire(Claim(10, "quiet")))
    await asyncio.sleep(0)
    assert admission.queued == 2
    with pytest.raises(OverloadedError) as refused:
        await flood[1]
    assert refused.value.code == "queue_full"
    admission.release(0.1)
    await flood[0]
    admission.release(0.1, 10)
    await quiet
    assert (admission.inflight, admission.inflight_tokens, admission.queued) == (1, 10, 0)


async def test_client_may_shorten_the_wait() -> None:
    admission = controller(1, 2, 60)
    await admission.acquire()
    with pytest.raises(OverloadedError) as refused:
        await admission.acquire(Claim(timeout_s=0.02))
    assert refused.value.code == "queue_timeout"
    assert "0.02 s" in refused.value.message


async def test_new_bounds_hold_from_the_next_place_on() -> None:
    admission = controller(1, 5)
    await admission.acquire()
    waiting = [asyncio.create_task(admission.acquire(Claim(tokens=8))) for _ in range(3)]
    await asyncio.sleep(0)
    admission.apply(AdmissionLimit(max_inflight=2, max_inflight_tokens=5, max_queued=5))
    await asyncio.sleep(0)
    # Larger than the new bound on tokens: it waits until it can run alone.
    assert (admission.inflight, admission.queued) == (1, 3)
    admission.release(0.1)
    assert (admission.inflight, admission.queued) == (1, 2)
    admission.apply(AdmissionLimit(max_inflight=3))
    await asyncio.gather(*waiting)
    assert (admission.inflight, admission.queued) == (3, 0)


async def test_brown_out_begins_late_and_ends_later() -> None:
    limit = AdmissionLimit(max_inflight=1, max_queued=10)
    brown_out = BrownOut.model_validate({"from": "large", "to": "small", "at_queue_fraction": 0.5})
    admission = AdmissionController(limit, brown_out)
    await admission.acquire()
    waiting: list[asyncio.Task[int]] = []
    seen = []
    for _ in range(6):
        seen.append(admission.under_pressure)
        waiting.append(asyncio.create_task(admission.acquire()))
        await asyncio.sleep(0)
    assert seen == [False] * 5 + [True]
    seen = []
    for task in waiting:
        admission.release(0.1)
        await task
        seen.append(admission.under_pressure)
    assert seen == [True] * 4 + [False, False]


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


async def test_time_limit_of_the_client_holds_in_the_queue_and_at_the_worker() -> None:
    admission = {"max_inflight": 1, "max_queued": 3}
    async with (
        MockEngine(Faults(latency_s=1.5)) as engine,
        gateway(settings_for(engine.url, admission=admission)) as harness,
    ):
        loop = asyncio.get_running_loop()
        first = asyncio.create_task(harness.post(COMPLETION, x_request_timeout="0.6"))
        await eventually(lambda: engine.running == 1)
        began = loop.time()
        waiting = await harness.post(COMPLETION, x_request_timeout="0.3")
        assert (waiting.status, waiting.error["code"]) == (429, "queue_timeout")
        assert loop.time() - began < 0.3 + 0.2
        served = await first
        assert (served.status, served.error["code"]) == (504, "total_timeout")
        assert engine.started == 1
        await eventually(lambda: engine.aborted == 1)


async def test_models_have_places_of_their_own() -> None:
    def configured(*names: str, **bounds: int) -> Settings:
        worker = {"url": "http://h:1"}
        models = [
            {"name": name, "max_model_len": 8, "workers": [{"name": f"w-{name}", **worker}]}
            for name in names
        ]
        return Settings.model_validate({"models": models, "admission": bounds})

    admission = Admission(configured("a", "b", max_inflight=1, max_queued=0))
    await admission.of("a").acquire()
    await admission.of("b").acquire()
    with pytest.raises(OverloadedError):
        await admission.of("a").acquire()
    assert (admission.inflight, admission.queued) == (2, 0)
    # A reload that drops one: what it holds is given back, and it is forgotten once it is idle.
    admission.apply(configured("b", max_inflight=2))
    await admission.of("b").acquire()
    admission.apply(configured("b", max_inflight=2))
    admission.of("a").release(0.1)
    assert admission.inflight == 2
    admission.apply(configured("b", max_inflight=2))
    with pytest.raises(KeyError):
        admission.of("a")


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
