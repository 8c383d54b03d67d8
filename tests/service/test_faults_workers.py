"""Workers that die, hang, crawl and talk nonsense, as processes, under load.

What must hold: a whole request is answered as long as another worker is healthy, a stream that
cannot go on ends in a well-formed error event, nothing stays counted, nothing takes longer than
its deadline.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from live_processes import House, eventually, house
from patience import HANGS_S, within
from raw_client import CHAT, Answer, body_of, post

from taut_deploy.bench.gateway_load import ClosedLoop, chat_body, request_bytes
from taut_deploy.bench.mock_answers import STREAM_HEAD

WHOLE = request_bytes(chat_body(200, stream=False), {}, CHAT)
MID_EVENT = len(STREAM_HEAD) + 300


async def load(home: House, seconds: float, connections: int = 16) -> Counter[str]:
    """Whole requests for some seconds, until some got through; what failed, by kind."""
    done, failures = 0, Counter[str]()
    async with asyncio.timeout(seconds + HANGS_S):
        while done <= 20:
            tally = await ClosedLoop(home.port, WHOLE).run(connections, seconds)
            done += tally.done
            failures += tally.failures
    return failures


async def streams(home: House, count: int) -> list[Answer]:
    asked = (post(home.port, body_of(stream=True), timeout_s=30) for _ in range(count))
    return await asyncio.gather(*asked)


async def one_good_answer(home: House) -> None:
    assert (await post(home.port, body_of())).status == 200


@pytest.mark.parametrize("ttft_s", [0.0, 0.05])
async def test_killing_a_worker_under_load_fails_no_whole_request(
    tmp_path: Path, ttft_s: float
) -> None:
    async with house(tmp_path, engines=2, behaviour={"ttft_s": ttft_s}) as home:
        running = asyncio.create_task(load(home, 3))
        await eventually(lambda: home.engines[0].state()["started"] > 20)
        home.engines[0].signal(signal.SIGKILL)
        assert await running == Counter()
        await home.quiet()


async def test_streams_of_a_killed_worker_end_in_an_error_event(tmp_path: Path) -> None:
    async with house(tmp_path, engines=2, behaviour={"itl_s": 0.05, "chunks": 80}) as home:
        running = asyncio.create_task(streams(home, 40))
        first = "taut_time_to_first_token_seconds_count"
        await eventually(lambda: home.gateway.total(first) == 40)
        lost = home.engines[0].state()["open"]
        assert lost > 0
        home.engines[0].signal(signal.SIGKILL)
        answers = await running
        assert all(answer.status == 200 and answer.whole for answer in answers)
        broken = [answer for answer in answers if answer.error]
        assert len(broken) == lost
        assert all(a.events[-1] == b"data: [DONE]" for a in answers if a not in broken)
        await home.quiet()


async def test_a_worker_that_kills_itself_mid_document_costs_no_request(tmp_path: Path) -> None:
    async with house(tmp_path, engines=2) as home:
        home.engines[0].behave(fault="kill", at_byte=200)
        assert await load(home, 1) == Counter()
        assert not home.engines[0].running


@pytest.mark.parametrize(
    ("fault", "at_byte"),
    [*product(["reset", "close"], [0, 60, 200]), ("garbage", 0)],
)
async def test_one_worker_that_breaks_every_answer_costs_no_whole_request(
    tmp_path: Path, fault: str, at_byte: int
) -> None:
    async with house(tmp_path, engines=2) as home:
        home.engines[0].behave(fault=fault, at_byte=at_byte)
        assert await load(home, 1, connections=4) == Counter()
        await home.quiet()


@pytest.mark.parametrize("status", [502, 503])
async def test_a_storm_of_gateway_errors_from_one_worker_costs_no_request(
    tmp_path: Path, status: int
) -> None:
    async with house(tmp_path, engines=2) as home:
        home.engines[0].behave(fault="status", status=status)
        assert await load(home, 1, connections=4) == Counter()
        await home.quiet()


async def test_a_storm_of_500_shows_no_worker_text_and_passes(tmp_path: Path) -> None:
    async with house(tmp_path, engines=1, behaviour={"fault": "status", "status": 500}) as home:
        answers = [await post(home.port, body_of()) for _ in range(20)]
        assert {answer.status for answer in answers} <= {502, 503}
        assert not any(b"injected" in answer.body for answer in answers)
        assert all(set(a.json["error"]) == {"message", "type", "param", "code"} for a in answers)
        home.engines[0].behave(fault="")
        await eventually_good(home)
        await home.quiet()


async def eventually_good(home: House, timeout_s: float = 45) -> None:
    """Wait until the gateway trusts its workers again."""

    async def good() -> bool:
        return (await post(home.port, body_of())).status == 200

    await eventually(good, timeout_s)


async def test_a_worker_that_hangs_ends_in_504_within_the_deadline(tmp_path: Path) -> None:
    timeouts = {"connect_s": 1, "first_byte_s": 1, "idle_s": 1, "total_s": 10}
    async with house(tmp_path, behaviour={"fault": "hang"}, timeouts=timeouts) as home:
        asked = asyncio.gather(*(post(home.port, body_of()) for _ in range(10)))
        assert {answer.status for answer in await within(5, asked)} == {504}
        await home.quiet()


async def test_a_hung_worker_is_left_alone_after_a_few_requests(tmp_path: Path) -> None:
    timeouts = {"connect_s": 2, "first_byte_s": 2, "idle_s": 2, "total_s": 20}
    routing = {"breaker": {"failures": 3, "window_s": 30, "open_s": 30}}
    async with house(tmp_path, engines=2, timeouts=timeouts, routing=routing) as home:
        home.engines[0].behave(fault="hang")
        first = await asyncio.gather(*(post(home.port, body_of()) for _ in range(20)))
        assert {answer.status for answer in first} == {200, 504}
        later = [await post(home.port, body_of()) for _ in range(20)]
        assert {answer.status for answer in later} == {200}
        await home.quiet()


async def test_a_frozen_worker_is_left_alone_and_comes_back(tmp_path: Path) -> None:
    timeouts = {"connect_s": 2, "first_byte_s": 2, "idle_s": 2, "total_s": 20}
    async with house(tmp_path, engines=2, timeouts=timeouts) as home:
        assert await load(home, 0.5, connections=4) == Counter()
        home.engines[0].signal(signal.SIGSTOP)  # the kernel still takes its connections
        first = await ClosedLoop(home.port, WHOLE).run(8, 6)
        assert set(first.failures) <= {"504", "502", "503"}
        assert await load(home, 1, connections=8) == Counter()
        home.engines[0].signal(signal.SIGCONT)
        await eventually(lambda: home.gateway.total("taut_worker_ready") == 2)
        before = home.engines[0].state()["started"]
        await eventually_loaded(home, before)
        await home.quiet()


async def eventually_loaded(home: House, before: int) -> None:
    """Wait until the first worker gets requests again."""

    async def loaded() -> bool:
        assert (await post(home.port, body_of())).status == 200
        return int(home.engines[0].state()["started"]) >= before + 5

    await eventually(loaded)


async def test_hedging_answers_what_a_hung_worker_holds(tmp_path: Path) -> None:
    routing = {"hedge": {"after_s": 0.2}}
    async with house(tmp_path, engines=2, routing=routing) as home:
        home.engines[0].behave(fault="hang")
        answers = await asyncio.gather(*(post(home.port, body_of()) for _ in range(20)))
        assert {answer.status for answer in answers} == {200}
        await home.quiet()


async def test_a_stream_that_falls_silent_ends_in_an_error_event(tmp_path: Path) -> None:
    timeouts = {"connect_s": 1, "first_byte_s": 2, "idle_s": 1, "total_s": 10}
    behaviour = {"fault": "stall", "at_byte": MID_EVENT}
    async with house(tmp_path, behaviour=behaviour, timeouts=timeouts) as home:
        for answer in await streams(home, 5):
            assert answer.status == 200
            assert answer.whole
            assert answer.error is not None
        await home.quiet()


async def test_a_slow_worker_is_waited_for(tmp_path: Path) -> None:
    async with house(tmp_path, behaviour={"fault": "trickle", "trickle_s": 0.001}) as home:
        whole, stream = await asyncio.gather(
            post(home.port, body_of()), post(home.port, body_of(stream=True))
        )
        assert whole.json["usage"]["completion_tokens"] == 4
        assert stream.events[-1] == b"data: [DONE]"
        assert stream.error is None
        await home.quiet()


@pytest.mark.parametrize("fault", ["reset", "close", "bad_chunk"])
async def test_a_stream_broken_mid_event_ends_in_an_error_event(tmp_path: Path, fault: str) -> None:
    async with house(tmp_path, behaviour={"fault": fault, "at_byte": MID_EVENT}) as home:
        for answer in await streams(home, 10):
            assert answer.status == 200
            assert answer.whole
            assert answer.error is not None
            for event in answer.events[:-1]:
                json.loads(event.removeprefix(b"data: "))
        await home.quiet()


async def test_a_stream_broken_in_its_head_is_tried_elsewhere(tmp_path: Path) -> None:
    async with house(tmp_path, engines=2) as home:
        home.engines[0].behave(fault="reset", at_byte=20)
        answers = await streams(home, 10)
        assert all(answer.events[-1] == b"data: [DONE]" for answer in answers)
        await home.quiet()


@pytest.mark.parametrize("fault", ["not_json", "bad_utf8", "unterminated"])
async def test_malformed_events_neither_break_framing_nor_the_gateway(
    tmp_path: Path, fault: str
) -> None:
    async with house(tmp_path, behaviour={"fault": fault}) as home:
        for answer in await streams(home, 5):
            assert answer.status == 200
            assert answer.whole
            assert answer.error is None or answer.error["code"]
        home.engines[0].behave(fault="")
        await eventually_good(home)
        await home.quiet()


async def test_a_worker_that_comes_back_gets_traffic_again(tmp_path: Path) -> None:
    async with house(tmp_path, engines=1) as home:
        await home.engines[0].kill()
        assert (await post(home.port, body_of())).status in (502, 503)
        await home.engines[0].start_and_wait()
        await eventually_good(home)


async def test_a_worker_whose_health_fails_gets_no_traffic(tmp_path: Path) -> None:
    async with house(tmp_path, engines=2) as home:
        home.engines[0].behave(health=503)
        await eventually(lambda: home.gateway.total("taut_worker_ready") == 1)
        before = home.engines[0].state()["started"]
        assert await load(home, 0.5, connections=4) == Counter()
        assert home.engines[0].state()["started"] == before
