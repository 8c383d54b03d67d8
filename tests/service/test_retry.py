"""Workers that fail: retried elsewhere before the first byte, said plainly after it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from gateway_harness import CHAT, COMPLETION, eventually, gateway, settings_for
from mock_engine import Faults, MockEngine


async def both_ready(harness: Any) -> bool:
    return set((await harness.states()).values()) == {"ready"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("faults", "cause"),
    [
        (Faults(reset=True), "reset"),
        (Faults(status=502), "502"),
        (Faults(status=503), "503"),
        (Faults(raw=b"SSH-2.0-OpenSSH\r\n\r\n"), "protocol"),
        (Faults(kill_at_byte=10), "reset"),
    ],
)
async def test_request_is_retried_on_another_worker(
    faults: Faults, cause: str, stream: bool
) -> None:
    async with (
        MockEngine(faults) as bad,
        MockEngine() as good,
        gateway(settings_for(bad.url, good.url)) as harness,
    ):
        await eventually(lambda: both_ready(harness))
        for _ in range(4):
            answer = await harness.post({**COMPLETION, "stream": stream})
            assert answer.status == 200
            assert answer.headers["x-taut-worker"] == "w1"
        retried = await harness.metric(f'taut_retries_total{{cause="{cause}"}}')
        # A reset of a pooled connection says nothing about the worker; it counts as stale.
        stale = await harness.metric('taut_retries_total{cause="stale"}')
        assert retried >= 1
        assert retried + stale == len(bad.seen)
        assert good.completed == 4


async def test_request_is_retried_when_connecting_fails() -> None:
    async with (
        MockEngine() as dying,
        MockEngine() as good,
        gateway(settings_for(dying.url, good.url)) as harness,
    ):
        await eventually(lambda: both_ready(harness))
        await dying.stop()
        answers = [await harness.post(COMPLETION) for _ in range(4)]
        assert [answer.status for answer in answers] == [200] * 4
        await eventually(lambda: is_unreachable(harness, "w0"))


async def is_unreachable(harness: Any, worker: str) -> bool:
    return bool((await harness.states())[worker] == "unreachable")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("faults", "status", "code"),
    [
        (Faults(reset=True), 502, "worker_lost"),
        (Faults(status=503, error_body=b"secret text"), 503, "worker_unavailable"),
        (Faults(status=500, error_body=b"secret text"), 502, "worker_error"),
        (Faults(status=302, error_body=b"secret text"), 502, "worker_error"),
    ],
)
async def test_failure_of_the_only_worker_is_an_openai_error(
    faults: Faults, status: int, code: str, stream: bool
) -> None:
    async with MockEngine(faults) as engine, gateway(settings_for(engine.url)) as harness:
        answer = await harness.post({**COMPLETION, "stream": stream})
        assert (answer.status, answer.error["code"]) == (status, code)
        assert answer.error["type"] in ("api_error", "service_unavailable_error")
        assert b"secret" not in answer.body
        assert ("retry-after" in answer.headers) == (status == 503)
        # A reset on a pooled connection is tried once more on a fresh one.
        assert len(engine.seen) == (2 if faults.reset else 1)


@pytest.mark.parametrize("status", [400, 401, 404, 415, 422, 429])
async def test_error_of_the_client_passes_unchanged(status: int) -> None:
    async with MockEngine(Faults(status=status)) as engine, gateway(settings_for(engine.url)) as h:
        answer = await h.post(COMPLETION)
        assert answer.status == status
        assert answer.body == engine.faults.error_body
        assert len(engine.seen) == 1


async def test_tries_are_bounded() -> None:
    engines = [MockEngine(Faults(status=503)) for _ in range(5)]
    for engine in engines:
        await engine.start()
    async with gateway(settings_for(*(engine.url for engine in engines))) as harness:
        await eventually(lambda: both_ready(harness))
        answer = await harness.post(COMPLETION)
        assert answer.status == 503
        assert sum(len(engine.seen) for engine in engines) == 3
    for engine in engines:
        await engine.stop()


async def test_pooled_connection_closed_by_the_worker_is_replaced() -> None:
    async with (
        MockEngine(Faults(close_reused=True)) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        for _ in range(5):
            assert (await harness.post(COMPLETION)).status == 200
        assert await harness.metric('taut_retries_total{cause="stale"}') >= 4
        assert engine.completed == 5


async def test_connections_are_reused() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        for _ in range(10):
            assert (await harness.post(COMPLETION)).status == 200
        # One for the prober's overlapping checks, one for the requests.
        assert len(engine.connections) <= 2


async def test_whole_answer_cut_in_the_middle_is_a_clean_502() -> None:
    async with (
        MockEngine(Faults(tokens=2000, kill_at_byte=3000)) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
            answer = await harness.post(body, path)
            assert (answer.status, answer.error["code"]) == (502, "worker_lost")


@pytest.mark.parametrize("kill_at", [200, 333, 341, 500, 777])
async def test_stream_cut_in_the_middle_ends_in_a_well_formed_error_event(kill_at: int) -> None:
    faults = Faults(tokens=50, interval_s=0.001, kill_at_byte=kill_at)
    async with MockEngine(faults) as engine, gateway(settings_for(engine.url)) as harness:
        answer = await harness.post({**COMPLETION, "stream": True})
        assert answer.status == 200
        assert answer.body.endswith(b"\n\n")
        events = [json.loads(e.removeprefix(b"data: ")) for e in answer.body.split(b"\n\n")[:-1]]
        assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
        assert events[-1]["error"]["code"] == "worker_lost"
        assert all("choices" in event for event in events[:-1])
        await eventually(lambda: '"status":502' in harness.log.getvalue())


async def test_least_loaded_worker_gets_the_request() -> None:
    slow, quick = Faults(latency_s=0.5), Faults(latency_s=0.01)
    async with (
        MockEngine(slow) as a,
        MockEngine(quick) as b,
        gateway(settings_for(a.url, b.url)) as harness,
    ):
        await eventually(lambda: both_ready(harness))
        running = [asyncio.create_task(harness.post(COMPLETION)) for _ in range(2)]
        await eventually(lambda: b.completed == 1)
        for _ in range(5):
            assert (await harness.post(COMPLETION)).headers["x-taut-worker"] == "w1"
        assert a.started == 1
        await asyncio.gather(*running)


async def test_equally_loaded_workers_take_turns() -> None:
    async with (
        MockEngine() as a,
        MockEngine() as b,
        gateway(settings_for(a.url, b.url)) as harness,
    ):
        await eventually(lambda: both_ready(harness))
        for _ in range(10):
            await harness.post(COMPLETION)
        assert (a.completed, b.completed) == (5, 5)


@pytest.mark.parametrize(
    ("limits", "faults", "code"),
    [
        ({"first_byte_s": 0.1}, Faults(latency_s=5), "worker_timeout"),
        ({"total_s": 0.1}, Faults(latency_s=5), "total_timeout"),
    ],
)
async def test_silent_worker_is_a_504(limits: Any, faults: Faults, code: str) -> None:
    async with (
        MockEngine(faults) as engine,
        gateway(settings_for(engine.url, timeouts=limits)) as harness,
    ):
        answer = await harness.post(COMPLETION)
        assert (answer.status, answer.error["code"]) == (504, code)
        await eventually(lambda: engine.aborted == 1)


@pytest.mark.parametrize("limits", [{"idle_s": 0.1}, {"total_s": 0.2}])
async def test_silence_within_a_stream_ends_it_with_an_error_event(limits: Any) -> None:
    faults = Faults(tokens=9, interval_s=3)
    async with (
        MockEngine(faults) as engine,
        gateway(settings_for(engine.url, timeouts=limits)) as harness,
    ):
        answer = await harness.post({**COMPLETION, "stream": True})
        last = json.loads(answer.body.split(b"\n\n")[-2].removeprefix(b"data: "))
        assert last["error"]["code"].endswith("timeout")
        await eventually(lambda: engine.aborted == 1)
