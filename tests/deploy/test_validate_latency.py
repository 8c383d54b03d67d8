"""Latency of two mock engines with known delays: the load, the verdict, failures of every kind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import numpy as np
import pytest

from taut_deploy.bench.gateway_process import start_engine
from taut_deploy.bench.mock_behaviour import Behaviour
from taut_deploy.ports import free_port
from taut_deploy.validate import CouldNotValidateError, Verdict
from taut_deploy.validate.gate import combine, judge_latency
from taut_deploy.validate.latency.measure import Endpoint, Measurement, measure
from taut_deploy.validate.latency.plan import LatencyPlan
from taut_deploy.validate.latency.prompts import make_prompts
from taut_deploy.validate.latency.ratios import error_rate, level_ratios
from taut_deploy.validate.latency.section import count_failed, measured_section
from taut_deploy.validate.policy import LatencyBounds
from taut_deploy.validate.text import TokenizedText

TOKENS = 6
NORMAL = {
    name: getattr(Behaviour(chunks=TOKENS), name)
    for name in ("ttft_s", "itl_s", "chunks", "fault", "fault_every", "at_byte", "status")
}


def text_of(rows: list[list[int]], bos: int | None = None) -> TokenizedText:
    return TokenizedText(tuple(map(tuple, rows)), bos, "sha", 1, "sha")


TEXT = text_of([list(range(10, 74)), list(range(74, 138))])


@dataclass
class Engine:
    """A mock engine as a process of its own."""

    url: str

    def behave(self, **fields: object) -> None:
        answer = httpx.post(f"{self.url}/mock/behaviour", json=NORMAL | fields)
        assert answer.status_code == 200, answer.text

    def state(self, name: str) -> int:
        return httpx.get(f"{self.url}/mock/state").json()[name]

    def endpoint(self, role: str) -> Endpoint:
        return Endpoint(role, self.url, "m")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    folder, running, found = tmp_path_factory.mktemp("engines"), [], []
    try:
        for name in ("baseline", "candidate"):
            port = free_port()
            cores = os.sched_getaffinity(0)
            running.append(start_engine([port], cores, folder / f"{name}.log", strict=True))
            found.append(Engine(f"http://127.0.0.1:{port}"))
        yield found[0], found[1]
    finally:
        for process in running:
            process.stop()


def run(
    engines: tuple[Engine, Engine], *, concurrency: tuple[int, ...] = (4,), **plan: object
) -> Measurement:
    changes = {"requests": 32, "prompt_tokens": 20, "output_tokens": TOKENS} | plan
    return measure(
        LatencyPlan(concurrency=concurrency, **changes),
        (engines[0].endpoint("baseline"), engines[1].endpoint("candidate")),
        TEXT,
        seed=3,
        on_block=lambda done, planned: None,
    )


def verdict_of(measurement: Measurement, **bounds: float) -> Verdict:
    ratios = {level.concurrency: level_ratios(level, 400, 0) for level in measurement.levels}
    failed = error_rate(*count_failed(measurement, "candidate"))
    # An error rate of zero in 32 requests has an upper end of 11 %.
    limits = LatencyBounds(**({"error_rate_at_most": 0.2} | bounds))
    return combine(rule.verdict for rule in judge_latency(limits, ratios, failed, {}))


BOUNDS = {
    "ttft_p50_ratio_at_most": 1.3,
    "itl_p50_ratio_at_most": 1.3,
    "throughput_ratio_at_least": 0.77,
}


@pytest.mark.parametrize("bound", BOUNDS.items(), ids=list(BOUNDS))
def test_a_candidate_twice_as_slow_fails_each_bound(slow_measurement, bound):
    assert verdict_of(slow_measurement, **dict([bound])) is Verdict.FAIL


@pytest.fixture(scope="module")
def slow_measurement(engines):
    engines[0].behave(ttft_s=0.04, itl_s=0.02)
    engines[1].behave(ttft_s=0.08, itl_s=0.04)
    return run(engines)


def test_the_clock_reads_the_delays_of_the_engine(slow_measurement):
    """Delays are a floor: a busy machine adds to them."""
    (level,) = slow_measurement.levels
    for role, factor in (("baseline", 1), ("candidate", 2)):
        answers = [answer for block in level.blocks(role) for answer in block.whole]
        assert len(answers) == 32
        assert {answer.tokens for answer in answers} == {TOKENS}
        assert {len(answer.gaps_s) for answer in answers} == {TOKENS - 1}
        assert min(answer.ttft_s for answer in answers) >= 0.04 * factor - 0.001
        itl = np.median([gap for answer in answers for gap in answer.gaps_s])
        assert itl >= 0.02 * factor - 0.002
        assert min(answer.e2e_s for answer in answers) >= 0.14 * factor - 0.001


def test_equal_engines_do_not_fail(engines):
    for engine in engines:
        engine.behave(ttft_s=0.02, itl_s=0.01)
    assert verdict_of(run(engines), **BOUNDS) is not Verdict.FAIL


def test_a_faster_candidate_passes(engines):
    engines[0].behave(ttft_s=0.08, itl_s=0.04)
    engines[1].behave(ttft_s=0.02, itl_s=0.01)
    measurement = run(engines)
    bounds = {"ttft_p50_ratio_at_most": 0.9, "itl_p50_ratio_at_most": 0.9}
    assert verdict_of(measurement, throughput_ratio_at_least=1.1, **bounds) is Verdict.PASS


def test_each_model_goes_first_once_in_every_two_blocks_and_warm_up_is_left_out(engines):
    for engine in engines:
        engine.behave()
    before = [engine.state("started") for engine in engines]
    measurement = run(engines, concurrency=(1, 4))
    for level in measurement.levels:
        assert len(level.pairs) == 8
        first = [baseline.went_first for baseline, _ in level.pairs]
        assert all(sum(first[i : i + 2]) == 1 for i in range(0, 8, 2))
        assert all(b.went_first is not c.went_first for b, c in level.pairs)
    for engine, started in zip(engines, before, strict=True):
        measured = 2 * 8 * 4
        assert engine.state("started") - started == measured + 2 * 4, "two warm-up blocks of four"


@pytest.mark.parametrize("concurrency", [1, 5])
def test_never_more_requests_are_in_flight_than_asked_for(engines, concurrency):
    for engine in engines:
        engine.behave(ttft_s=0.005, capacity=concurrency, queue=0)
    measurement = run(engines, concurrency=(concurrency,), requests=40)
    for engine in engines:
        engine.behave(capacity=0)
    assert [count_failed(measurement, role)[0] for role in ("baseline", "candidate")] == [0, 0]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"fault": "status", "status": 503}, "HTTP 503: injected"),
        ({"fault": "status", "status": 429}, "HTTP 429: injected"),
        ({"fault": "close", "at_byte": 0}, "connection: RemoteProtocolError"),
        ({"fault": "close", "at_byte": 400}, "connection: RemoteProtocolError"),
        ({"fault": "reset", "at_byte": 400}, "connection: ReadError"),
        ({"fault": "garbage"}, "connection: RemoteProtocolError"),
        ({"fault": "bad_chunk", "at_byte": 300}, "connection: RemoteProtocolError"),
        ({"fault": "not_json"}, "an event that is not JSON"),
        ({"fault": "bad_utf8"}, "an event that is not JSON"),
        ({"fault": "unterminated"}, "the stream ended without [DONE]"),
        ({"chunks": 3}, "3 tokens in place of 6"),
        ({"chunks": 9}, "9 tokens in place of 6"),
    ],
)
def test_failures_of_the_candidate_are_counted_by_kind_and_fail_it(engines, fault, kind):
    engines[0].behave(itl_s=0.002)
    # Every second request; an answer of the wrong length is always wrong.
    always = "chunks" in fault
    engines[1].behave(itl_s=0.002, fault_every=1 if always else 2, **fault)
    measurement = run(engines)
    failed, sent = count_failed(measurement, "candidate")
    assert failed == sent if always else failed == sent // 2
    (level,) = measurement.levels
    section = measured_section(LatencyPlan(), measurement, {4: level_ratios(level, 200, 0)}, 1.0)
    assert list(section["levels"][0]["candidate"]["failures"]) == [kind]
    assert section["levels"][0]["baseline"]["failures"] == {}
    assert section["error_rate"]["candidate"]["failed"] == failed
    assert verdict_of(measurement, itl_p50_ratio_at_most=100.0) is Verdict.FAIL


def test_an_answer_that_stalls_is_a_failed_request(engines):
    engines[0].behave()
    # Of 36 requests two, one of them perhaps in the warm-up.
    engines[1].behave(fault="stall", at_byte=400, fault_every=18)
    measurement = run(engines, timeout_s=3)
    (level,) = measurement.levels
    stalled = [a for block in level.blocks("candidate") for a in block.answers if a.failure]
    assert 1 <= len(stalled) <= 2
    for answer in stalled:
        assert answer.failure == "no whole answer within 3 s"
        assert answer.e2e_s >= 3
        assert (answer.tokens, answer.gaps_s) == (0, ())


def test_a_candidate_that_never_answers_is_given_up_and_fails(engines):
    engines[0].behave()
    engines[1].behave(fault="hang")
    measurement = run(engines, timeout_s=0.5, concurrency=(4, 8), requests=64)
    assert measurement.gave_up is not None
    assert "8 requests in a row failed, the last with: no whole answer" in measurement.gave_up
    assert [len(level.pairs) for level in measurement.levels] == [2], (
        "not sixteen, nor concurrency 8"
    )
    assert count_failed(measurement, "candidate") == (8, 8)
    assert verdict_of(measurement, itl_p50_ratio_at_most=2.0) is Verdict.FAIL


def test_a_dead_candidate_fails(engines):
    engines[0].behave()
    nobody = Engine(f"http://127.0.0.1:{free_port()}")
    measurement = run((engines[0], nobody))
    assert "connection: ConnectError" in (measurement.gave_up or "")
    assert verdict_of(measurement, itl_p50_ratio_at_most=2.0) is Verdict.FAIL


def test_a_dead_baseline_cannot_be_compared_with(engines):
    engines[1].behave()
    nobody = Engine(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(CouldNotValidateError, match=r"baseline http.*ConnectError") as caught:
        run((nobody, engines[1]))
    assert "\n" not in str(caught.value)


def test_a_server_that_refuses_the_request_is_not_measured(engines):
    engines[0].behave()
    engines[1].behave(fault="status", status=400)
    with pytest.raises(CouldNotValidateError, match=r"candidate .* refused the latency request"):
        run(engines)


def test_an_engine_that_drops_idle_connections_loses_no_request(engines):
    """What uvicorn does after five idle seconds, at every pause between blocks."""
    engines[0].behave(itl_s=0.001)
    engines[1].behave(itl_s=0.001)
    measurement = run(engines)
    assert count_failed(measurement, "candidate") == (0, 32)
    assert engines[1].state("malformed_requests") == 0, "strict JSON over strict HTTP"


@pytest.mark.parametrize("bos", [None, 7])
@pytest.mark.parametrize("length", [2, 16, 17, 300])
def test_prompts_have_their_length_and_share_no_beginning(bos, length):
    rows = [[*([] if bos is None else [bos]), *range(100, 164)]] * 2
    prompts = make_prompts(text_of(rows, bos), 200, length, np.random.default_rng(0))
    assert {len(prompt) for prompt in prompts} == {length}
    body = slice(0 if bos is None else 1, None)
    assert all(set(prompt[body]) <= set(range(100, 164)) for prompt in prompts)
    assert bos is None or {prompt[0] for prompt in prompts} == {bos}
    if length > 2:
        assert len({tuple(prompt[:16]) for prompt in prompts}) == 200


def test_both_models_get_the_same_prompts_and_another_seed_gives_others():
    def drawn(seed: int) -> list[list[int]]:
        return make_prompts(TEXT, 5, 40, np.random.default_rng(seed))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"requests": 0}, "--latency-requests: 0 is below 1"),
        ({"requests": -5}, "--latency-requests: -5 is below 1"),
        ({"requests": 28}, "28 make 7 blocks of 4 at concurrency 1.*give at least 29"),
        ({"concurrency": (32,)}, "96 make 3 blocks of 32 at concurrency 32.*at least 225"),
        ({"concurrency": ()}, "--latency-concurrency: give at least one"),
        ({"concurrency": (0,)}, "--latency-concurrency: 0 is not in 1 to 1024"),
        ({"concurrency": (-1,)}, "--latency-concurrency: -1 is not in"),
        ({"concurrency": (1025,)}, "--latency-concurrency: 1025 is not in"),
        ({"concurrency": (2, 2)}, "--latency-concurrency: a number is given twice"),
        ({"prompt_tokens": 1}, "--latency-prompt-tokens: 1 is below 2"),
        ({"output_tokens": 1}, "--latency-output-tokens: 1 is below 2"),
        ({"timeout_s": 0.0}, "--latency-timeout-s: 0.0 is not a positive"),
        ({"timeout_s": float("nan")}, "--latency-timeout-s: nan is not a positive"),
        ({"timeout_s": float("inf")}, "--latency-timeout-s: inf is not a positive"),
    ],
)
def test_plans_out_of_range_are_refused_by_flag(change, fragment):
    with pytest.raises(CouldNotValidateError, match=fragment):
        LatencyPlan(**change)


def test_the_number_that_a_refusal_names_is_enough():
    assert LatencyPlan(requests=225, concurrency=(32,)).blocks(32) == 8
    assert LatencyPlan(requests=29, concurrency=(1,)).blocks(1) == 8
