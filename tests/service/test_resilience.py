"""What the gateway does about workers that fail, hang or have too much to do."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from gateway_harness import COMPLETION, QUICK, Harness, eventually, gateway, settings_for
from mock_engine import Faults, MockEngine

from taut_service.worker.worker import Worker, WorkerState


def worker(harness: Harness, name: str) -> Worker:
    found = harness.app.reloader.current.worker(name)
    assert found is not None
    return found


async def all_ready(harness: Harness) -> bool:
    return set((await harness.states()).values()) == {"ready"}


@asynccontextmanager
async def two_workers(
    first: Faults | None = None, **sections: Any
) -> AsyncIterator[tuple[MockEngine, MockEngine, Harness]]:
    async with (
        MockEngine(first) as a,
        MockEngine() as b,
        gateway(settings_for(a.url, b.url, **sections)) as harness,
    ):
        await eventually(lambda: all_ready(harness))
        yield a, b, harness
        for name in ("w0", "w1"):
            await eventually(lambda name=name: worker(harness, name).outstanding == 0)
            assert worker(harness, name).outstanding_tokens == 0


@pytest.mark.parametrize("status", [500, 502])
async def test_broken_worker_is_left_alone_then_tried_with_one_request(status: int) -> None:
    routing = {"breaker": {"failures": 3, "window_s": 600, "open_s": 60}}
    async with two_workers(Faults(status=status), routing=routing) as (bad, good, harness):
        # The breaker's time passes when the test says so, however slow the machine is.
        now = time.monotonic()
        worker(harness, "w0").breaker._clock = lambda: now
        for _ in range(30):
            await harness.post(COMPLETION)
        assert len(bad.seen) == 3
        assert await harness.metric('taut_worker_breaker_state{worker="w0"}') == 2
        now += 59
        assert (await harness.post(COMPLETION)).headers["x-taut-worker"] == "w1"
        now += 2
        bad.faults.latency_s = 0.1
        await asyncio.gather(*(harness.post(COMPLETION) for _ in range(10)))
        assert len(bad.seen) == 4, "one probe, which failed"
        now += 61
        bad.faults = Faults()
        await asyncio.gather(*(harness.post(COMPLETION) for _ in range(10)))
        assert worker(harness, "w0").breaker.closed
        assert await harness.metric('taut_worker_breaker_opened_total{worker="w0"}') == 2
        assert good.seen


async def test_only_worker_is_used_although_its_breaker_is_open() -> None:
    routing = {"breaker": {"failures": 2, "open_s": 60}}
    async with (
        MockEngine(Faults(status=500)) as engine,
        gateway(settings_for(engine.url, routing=routing)) as harness,
    ):
        for _ in range(5):
            assert (await harness.post(COMPLETION)).error["code"] == "worker_error"
        assert worker(harness, "w0").breaker.state == "open"
        engine.faults = Faults()
        assert (await harness.post(COMPLETION)).status == 200


async def test_worker_that_says_too_busy_gets_fewer_requests_and_stays_in_use() -> None:
    async with two_workers(Faults(status=503)) as (busy, _, harness):
        for _ in range(40):
            assert (await harness.post(COMPLETION)).status == 200
        assert len(busy.seen) < 8
        assert worker(harness, "w0").breaker.closed
        assert worker(harness, "w0").ready


async def test_retries_end_with_the_budget() -> None:
    retries = {"budget_ratio": 0, "budget_min_per_s": 0, "budget_burst": 2}
    # The breaker is kept out of it.
    routing = {"retries": retries, "breaker": {"failures": 1000}}
    async with two_workers(Faults(reset=True), routing=routing) as (_, good, harness):
        answers = [await harness.post(COMPLETION) for _ in range(12)]
        failed = [answer for answer in answers if answer.status != 200]
        # Each bad try is a retry of the two in the budget, or a failed request.
        assert {answer.error["code"] for answer in failed} == {"worker_lost"}
        assert len(failed) >= 3
        assert await harness.metric('taut_retries_refused_total{model="m"}') == len(failed)
        assert good.completed == len(answers) - len(failed)


async def test_failed_connections_cost_no_budget() -> None:
    retries = {"budget_ratio": 0, "budget_min_per_s": 0, "budget_burst": 0}
    async with two_workers(routing={"retries": retries}) as (dying, _, harness):
        await dying.stop()
        answers = await asyncio.gather(*(harness.post(COMPLETION) for _ in range(10)))
        assert {answer.status for answer in answers} == {200}


@pytest.mark.parametrize("at_byte", [100, 200, 3000])
async def test_whole_answer_that_breaks_off_is_asked_of_another_worker(at_byte: int) -> None:
    faults = Faults(tokens=2000, kill_at_byte=at_byte)
    async with two_workers(faults) as (_, good, harness):
        for _ in range(4):
            answer = await harness.post(COMPLETION)
            assert (answer.status, answer.headers["x-taut-worker"]) == (200, "w1")
            assert answer.json["usage"]["completion_tokens"] == 4
        assert good.completed == 4
        assert await harness.metric('taut_retries_total{cause="reset"}') >= 1


@pytest.mark.parametrize("at_byte", [20, 110, 125])
async def test_stream_that_dies_before_its_first_event_is_asked_of_another(at_byte: int) -> None:
    async with two_workers(Faults(kill_at_byte=at_byte)) as (_, __, harness):
        for _ in range(4):
            answer = await harness.post({**COMPLETION, "stream": True})
            assert (answer.status, answer.headers["x-taut-worker"]) == (200, "w1")
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert b"error" not in answer.body


async def test_hedge_wins_over_a_slow_worker_and_breaks_it_off() -> None:
    hedge = {"hedge": {"after_s": 0.05}}
    async with two_workers(Faults(latency_s=5), routing=hedge) as (slow, quick, harness):
        for _ in range(4):
            answer = await harness.post(COMPLETION)
            assert (answer.status, answer.headers["x-taut-worker"]) == (200, "w1")
        await eventually(lambda: slow.running == 0)
        assert slow.aborted >= 1
        assert quick.completed == 4
        sent = await harness.metric('taut_hedges_total{model="m"}')
        assert sent == slow.aborted
        assert await harness.metric('taut_hedges_won_total{model="m"}') == sent
        assert await harness.metric("taut_inflight_requests") == 0


async def test_first_worker_wins_when_the_hedge_is_slower() -> None:
    hedge = {"hedge": {"after_s": 0.05}}
    async with two_workers(Faults(latency_s=0.1), routing=hedge) as (a, b, harness):
        b.faults.latency_s = 5
        for _ in range(4):
            assert (await harness.post(COMPLETION)).headers["x-taut-worker"] == "w0"
        await eventually(lambda: b.running == 0)
        assert a.completed == 4


@pytest.mark.parametrize("fault", [Faults(latency_s=0.1, status=503), Faults(latency_s=0.1)])
async def test_hedge_survives_a_failure_of_either_side(fault: Faults) -> None:
    hedge = {"hedge": {"after_s": 0.02}}
    async with two_workers(fault, routing=hedge) as (_, b, harness):
        b.faults = Faults(latency_s=0.2) if fault.status == 503 else Faults(reset=True)
        answers = await asyncio.gather(*(harness.post(COMPLETION) for _ in range(6)))
        assert {answer.status for answer in answers} == {200}


async def test_streams_and_quick_answers_are_not_hedged() -> None:
    hedge = {"hedge": {"after_s": 0.2}}
    async with two_workers(routing=hedge) as (a, b, harness):
        a.faults.latency_s = b.faults.latency_s = 0.3
        assert (await harness.post({**COMPLETION, "stream": True})).status == 200
        a.faults.latency_s = b.faults.latency_s = 0
        assert (await harness.post(COMPLETION)).status == 200
        assert len(a.seen) + len(b.seen) == 2


async def test_client_that_leaves_ends_both_copies() -> None:
    hedge = {"hedge": {"after_s": 0.02}}
    slow = Faults(latency_s=5)
    async with two_workers(slow, routing=hedge) as (a, b, harness):
        b.faults.latency_s = 5
        client = await harness.connect()
        await client.send("POST", "/v1/completions", json.dumps(COMPLETION).encode())
        await eventually(lambda: a.running == 1 and b.running == 1)
        client.close()
        await eventually(lambda: a.aborted == 1 and b.aborted == 1)


@asynccontextmanager
async def scripted(*pieces: bytes, pause_s: float = 0.02) -> AsyncIterator[str]:
    """A worker that answers every POST with these pieces, paused, and then falls silent."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause_s)
        if pieces[-1:] == (b"",):
            writer.close()
        else:
            await reader.read()
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


EVENT = b'data: {"choices":[]}\n\n'
PING = b": ping\n\n"


@pytest.mark.parametrize(
    ("limits", "pieces"),
    [({"gap_s": 0.15}, [EVENT, *[PING] * 60]), ({"first_token_s": 0.15}, [PING] * 60)],
)
async def test_keep_alive_comments_are_no_tokens(limits: Any, pieces: list[bytes]) -> None:
    async with (
        scripted(*pieces) as url,
        gateway(settings_for(url, golden=False, timeouts=limits)) as harness,
    ):
        answer = await harness.post({**COMPLETION, "stream": True})
        last = json.loads(answer.body.split(b"\n\n")[-2].removeprefix(b"data: "))
        assert last["error"]["code"] == "worker_timeout"
        assert PING in answer.body
        assert answer.body.count(PING) < 40


async def test_tokens_in_time_pass_both_limits() -> None:
    limits = {"gap_s": 0.2, "first_token_s": 0.2, "idle_s": 5}
    async with (
        scripted(*[EVENT] * 30, b"data: [DONE]\n\n", b"") as url,
        gateway(settings_for(url, golden=False, timeouts=limits)) as harness,
    ):
        answer = await harness.post({**COMPLETION, "stream": True})
        assert answer.body == EVENT * 30 + b"data: [DONE]\n\n"


async def test_slow_reader_is_not_the_workers_silence() -> None:
    faults = Faults(tokens=400, token="t" * 4096)
    limits = {"gap_s": 0.1, "idle_s": 0.1}
    async with (
        MockEngine(faults) as engine,
        gateway(settings_for(engine.url, timeouts=limits)) as harness,
    ):
        client = await harness.connect()
        await client.begin_stream()
        events = b""
        async for chunk in client.chunks():
            events += chunk
            if len(events) < 400_000:
                await asyncio.sleep(0.02)
        assert events.endswith(b"data: [DONE]\n\n")
        client.close()


@pytest.mark.parametrize(
    ("rest", "code"),
    [
        (b'data: {"choices":[{"te', "worker_lost"),
        (b"data: [DONE]", None),
        (b"data: [DONE]\n", None),
        (b'data: {"choices":[]}\n', None),
        (b"\x00\xff\xfe garbage", "worker_lost"),
        (b"\n", None),
    ],
)
async def test_stream_that_ends_within_an_event_is_not_silent(
    rest: bytes, code: str | None
) -> None:
    async with (
        scripted(EVENT, rest, b"") as url,
        gateway(settings_for(url, golden=False)) as harness,
    ):
        answer = await harness.post({**COMPLETION, "stream": True})
        assert answer.body.startswith(EVENT)
        events = answer.body.split(b"\n\n")
        assert events[-1] in (b"", b"\n")
        if code is None:
            assert answer.body.strip() == (EVENT + rest).strip()
        else:
            assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == code


async def test_load_that_a_worker_reports_from_elsewhere_counts() -> None:
    busy = b"vllm:num_requests_running 40\nvllm:num_requests_waiting 9\n"
    load = {"every_s": 0.02, "stale_after_s": 1}
    async with two_workers(Faults(metrics=busy), routing={"load": load}) as (a, b, harness):
        b.faults.metrics = b"vllm:num_requests_running 0\n"
        await eventually(lambda: worker(harness, "w0").load() > 0)
        for _ in range(10):
            assert (await harness.post(COMPLETION)).headers["x-taut-worker"] == "w1"
        a.faults.metrics = b"vllm:num_requests_running 0\n"
        await eventually(lambda: worker(harness, "w0").load() == 0)
        places = {(await harness.post(COMPLETION)).headers["x-taut-worker"] for _ in range(6)}
        assert places == {"w0", "w1"}


async def test_a_worker_without_company_is_not_asked_for_its_load() -> None:
    busy = Faults(metrics=b"vllm:num_requests_running 40\n")
    async with MockEngine(busy) as a, MockEngine(busy) as b:
        load = {"load": {"every_s": 0.02}}
        async with gateway(settings_for(a.url, routing=load)) as harness:
            await eventually(lambda: worker(harness, "w0").ready)
            await asyncio.sleep(0.3)
            assert worker(harness, "w0").reported is None
        async with gateway(settings_for(a.url, b.url, routing=load)) as harness:
            await eventually(lambda: worker(harness, "w0").reported is not None)


async def test_worker_that_is_drained_keeps_what_it_has_and_gets_no_more() -> None:
    async with two_workers(Faults(tokens=30, interval_s=0.01)) as (a, _, harness):
        streams = [
            asyncio.create_task(harness.post({**COMPLETION, "stream": True})) for _ in range(2)
        ]
        await eventually(lambda: a.running == 1)
        worker(harness, "w0").drain()
        assert (await harness.states())["w0"] == "draining"
        for _ in range(5):
            assert (await harness.post(COMPLETION)).headers["x-taut-worker"] == "w1"
        answers = await asyncio.gather(*streams)
        assert all(answer.body.endswith(b"[DONE]\n\n") for answer in answers)
        worker(harness, "w0").undrain()
        places = {(await harness.post(COMPLETION)).headers["x-taut-worker"] for _ in range(6)}
        assert places == {"w0", "w1"}


async def test_ready_worker_that_begins_to_compute_rubbish_is_found() -> None:
    times = replace(QUICK, golden_again_s=0.2)
    async with (
        MockEngine() as engine,
        gateway(settings_for(engine.url), times=times) as harness,
    ):
        await eventually(lambda: engine.probes >= 2)
        engine.faults.golden_status = 503
        seen = engine.probes
        await eventually(lambda: engine.probes >= seen + 3)
        assert worker(harness, "w0").ready, "too busy is not wrong"
        engine.faults.golden_status = 200
        engine.faults.first_token = "?"
        await eventually(lambda: worker(harness, "w0").state is WorkerState.WRONG_TOKEN)
        assert (await harness.post(COMPLETION)).status == 503


async def test_everything_is_counted_out_after_random_ends() -> None:
    rng = random.Random(11)
    routing = {"hedge": {"after_s": 0.01}, "breaker": {"failures": 3, "open_s": 0.05}}
    async with two_workers(Faults(tokens=5, interval_s=0.004), routing=routing) as (a, b, harness):

        async def visit() -> None:
            client = await harness.connect()
            body = {**COMPLETION, "stream": rng.random() < 0.5}
            await client.send("POST", "/v1/completions", json.dumps(body).encode())
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.03)
            else:
                await client.answer()
            client.close()

        async def disturb() -> None:
            for _ in range(30):
                engine = rng.choice([a, b])
                engine.faults = rng.choice(
                    [
                        Faults(tokens=5, interval_s=0.004),
                        Faults(latency_s=0.03),
                        Faults(status=rng.choice([500, 502, 503])),
                        Faults(reset=True),
                        Faults(tokens=5, interval_s=0.004, kill_at_byte=rng.randrange(50, 600)),
                        Faults(raw=b"garbage\r\n\r\n"),
                    ]
                )
                await asyncio.sleep(0.02)

        disturbing = asyncio.create_task(disturb())
        for _ in range(20):
            await asyncio.gather(*(visit() for _ in range(25)))
        await disturbing
        await eventually(lambda: harness.app.drain.live == 0)
        assert await harness.metric("taut_inflight_requests") == 0
        await eventually(lambda: a.running == b.running == 0)
        a.faults = b.faults = Faults()
        await asyncio.sleep(0.1)
        answers = await asyncio.gather(*(harness.post(COMPLETION) for _ in range(20)))
        assert {answer.status for answer in answers} == {200}
