"""The guard in a running gateway: harm is caught, sameness is not, and clients notice nothing."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import Harness, eventually, gateway, variants_for
from mock_engine import Faults
from mock_reader import Reading, ReadingEngine
from pydantic import ValidationError

from taut_service.built import how_built
from taut_service.call import ROUTES, Call
from taut_service.config.settings import Settings
from taut_service.guard.evidence import MUST_HOLD
from taut_service.guard.guard import Guard
from taut_service.guard.reader import Reader
from taut_service.guard.tap import MAX_BYTES, Heard, Tap
from taut_service.http.client_exchange import ClientExchange
from taut_service.watch.metrics import Metrics

ALARM = math.log(1 / 0.05)
EVERYTHING = {"sample": 1.0, "max_cpu_share": None, "max_queued": 500, "timeout_s": 5.0}


def settings_of(
    candidate: ReadingEngine, *baselines: ReadingEngine, weight: float = 1.0, **guard: Any
) -> Settings:
    each = {"base": {"weight": 1 - weight}, "small": {"weight": weight}}
    engines: Any = {"base": list(baselines), "small": [candidate]}
    model = variants_for(engines, baseline="base", each=each)
    model["max_model_len"] = 4096
    return Settings.model_validate({"models": [model], "guard": {**EVERYTHING, **guard}})


@asynccontextmanager
async def guarded(settings: Settings) -> AsyncIterator[tuple[Harness, Guard]]:
    async with gateway(settings) as harness:
        await eventually(lambda: all(w.ready for _, _, w in workers(harness)))
        guard = harness.app.guard
        assert guard is not None
        yield harness, guard


def workers(harness: Harness) -> Any:
    return harness.app.reloader.current.workers()


async def send(harness: Harness, count: int, **fields: Any) -> None:
    """Send so many different completions, and wait until all were compared."""
    before = await ended(harness)
    for number in range(count):
        body = {"model": "m", "prompt": f"question {number}?", "max_tokens": 12, **fields}
        answer = await harness.post(body)
        assert answer.status == 200, answer.body
    async with asyncio.timeout(30):
        while await ended(harness) < before + count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def ended(harness: Harness, result: str = "") -> float:
    text = (await harness.request("GET", "/metrics")).body.decode()
    lines = [line for line in text.splitlines() if line.startswith("taut_guard_answers_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if f'"{result}' in line)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_harmed_variant_is_caught_and_the_measure_named(stream: bool) -> None:
    async with (
        ReadingEngine() as base,
        ReadingEngine(Reading(harm=2.0)) as small,
        guarded(settings_of(small, base)) as (harness, guard),
    ):
        await send(harness, 12, stream=stream)
        evidence = guard.evidence("m", "small")
        harm = evidence.harm()
        assert harm.log_evidence > ALARM, evidence.shown(0.05)
        assert (harm.measure in MUST_HOLD, harm.kind) == (True, "all")
        assert evidence.answers == 12
        assert evidence.tokens == 12 * 12 * len(" tok")
        assert await harness.metric('taut_guard_paused{model="m",variant="small"}') == 0


@pytest.mark.parametrize("seed", range(20))
async def test_the_baseline_against_itself_never_alarms_and_is_held(seed: int) -> None:
    # Bounds that few answers prove.
    wide = {"max_kl_excess_nats": 0.05, "max_disagreement_excess": 0.1}
    noisy = [Reading(noise=0.3, seed=seed * 3 + i) for i in range(3)]
    async with (
        ReadingEngine(noisy[0]) as base,
        ReadingEngine(noisy[1]) as other,
        ReadingEngine(noisy[2]) as small,
        guarded(settings_of(small, base, other, regenerate=False, **wide)) as (harness, guard),
    ):
        worst = -math.inf
        for _ in range(12):
            await send(harness, 5)
            worst = max(worst, guard.evidence("m", "small").harm().log_evidence)
        assert worst < ALARM
        evidence = guard.evidence("m", "small")
        assert evidence.shown(0.05)["disagreement_of_variant"].mean > 0  # noise there is
        assert evidence.lacking(0.05) == [], evidence.shown(0.05)


HARMS = {
    "another model": (Reading(harm=8.0), *MUST_HOLD),
    "another chat template": (Reading(prefix="<system>be brief"), *MUST_HOLD),
    "another tokenizer": (Reading(encoding="utf-16-le"), *MUST_HOLD),
    "NaN": (Reading(nan=True), *MUST_HOLD),
    "twice as slow": (Reading(delay_s=0.2), "slow"),
    "reads fail": (Reading(status=500), "failed"),
    "no logprobs": (Reading(raw=b'{"choices": [{}]}'), "failed"),
    "loops": (Reading(answer="again and " * 40), "loop"),
    "cut off": (Reading(answer="short", finish_reason="length"), "cut"),
}


@dataclass
class Clock:
    """What readings are timed with instead of the machine's: only delays move it."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("name", HARMS)
async def test_each_harm_is_caught_by_its_measure(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, *measures = HARMS[name]
    clock = Clock()
    monkeypatch.setattr("taut_service.guard.reader.time", clock)
    async with (
        ReadingEngine(Reading(delay_s=0.1, sleep=clock.sleep)) as base,
        ReadingEngine(replace(reading, sleep=clock.sleep)) as small,
        # One at a time: each reading's delay is its own.
        guarded(settings_of(small, base, concurrency=1)) as (harness, guard),
    ):
        for number in range(30):
            body = {"model": "m", "messages": [{"role": "user", "content": f"q {number}"}]}
            assert (await harness.post(body, "/v1/chat/completions")).status == 200
        await eventually(lambda: guard.evidence("m", "small").answers == 30, 20)
        harm = guard.evidence("m", "small").harm()
        assert harm.log_evidence > ALARM, guard.evidence("m", "small").shown(0.05)
        assert harm.measure in measures


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = Reading(answer='{"city": "Oslo"}', calls_tool="weather")
TOOL_HARMS = {
    "calls come as text": (Reading(answer='<tool_call>{"name": "weather"}'), "invalid"),
    "calls what nobody offered": (replace(CALL, calls_tool="wether"), "invalid"),
    "arguments are no JSON": (replace(CALL, answer='{"city": '), "invalid"),
    "another template of tools": (replace(CALL, prefix="tools: none"), *MUST_HOLD),
}


@pytest.mark.parametrize("served_by", ["baseline", "candidate"])
@pytest.mark.parametrize("name", TOOL_HARMS)
async def test_broken_tool_calls_are_caught(name: str, served_by: str) -> None:
    reading, *measures = TOOL_HARMS[name]
    async with ReadingEngine(replace(CALL)) as base, ReadingEngine(replace(reading)) as small:
        weight = float(served_by == "candidate")
        async with guarded(settings_of(small, base, weight=weight)) as (harness, guard):
            await ask_for_the_weather(harness, guard, 40)
            harm = guard.evidence("m", "small").harm()
            assert harm.log_evidence > ALARM, guard.evidence("m", "small").shown(0.05)
            assert (harm.kind in ("all", "tools"), harm.measure in measures) == (True, True)


async def test_equal_tool_calls_are_no_harm() -> None:
    async with (
        ReadingEngine(replace(CALL)) as base,
        ReadingEngine(replace(CALL)) as small,
        guarded(settings_of(small, base)) as (harness, guard),
    ):
        await ask_for_the_weather(harness, guard, 40)
        assert guard.evidence("m", "small").tally("invalid").mean == 0
        assert guard.evidence("m", "small").harm().log_evidence < 0


async def ask_for_the_weather(harness: Harness, guard: Guard, count: int) -> None:
    for number in range(count):
        ask = {"role": "user", "content": f"weather in {number}?"}
        body = {"model": "m", "messages": [ask], "tools": [WEATHER]}
        assert (await harness.post(body, "/v1/chat/completions")).status == 200
    await eventually(lambda: guard.evidence("m", "small").answers == count, 20)


@pytest.mark.parametrize("served_by", ["baseline", "candidate"])
@pytest.mark.parametrize(("temperature", "measure"), [(0.3, "colder"), (2.5, "warmer")])
async def test_another_temperature_by_default_is_caught(
    temperature: float, measure: str, served_by: str
) -> None:
    weight = float(served_by == "candidate")
    async with (
        ReadingEngine(Reading(temperature=1.0)) as base,
        ReadingEngine(Reading(temperature=temperature)) as small,
        guarded(settings_of(small, base, weight=weight)) as (harness, guard),
    ):
        await send(harness, 60)
        evidence = guard.evidence("m", "small")
        # Teacher forcing alone finds them equal.
        assert evidence.tally("kl").mean == evidence.tally("disagreement").mean == 0
        assert evidence.harm().log_evidence > ALARM, evidence.shown(0.05)
        assert evidence.harm().measure == measure


@pytest.mark.parametrize("seed", range(5))
async def test_answers_drawn_alike_are_no_harm(seed: int) -> None:
    async with (
        ReadingEngine(Reading(temperature=1.0, seed=seed)) as base,
        ReadingEngine(Reading(temperature=1.0, seed=seed + 100)) as small,
        guarded(settings_of(small, base)) as (harness, guard),
    ):
        worst = -math.inf
        for _ in range(8):
            await send(harness, 5)
            worst = max(worst, guard.evidence("m", "small").harm().log_evidence)
        evidence = guard.evidence("m", "small")
        assert evidence.tally("warmer").size == 40 and len(evidence.tally("warmer").counts) > 20
        assert worst < ALARM


async def test_a_temperature_that_the_client_names_costs_no_further_reading() -> None:
    async with (
        ReadingEngine() as base,
        ReadingEngine() as small,
        guarded(settings_of(small, base)) as (harness, guard),
    ):
        await send(harness, 2, temperature=0.5)
        assert base.reading.calls.count("read") == 2 * 2
        assert guard.evidence("m", "small").tally("warmer").size == 0


async def test_structure_that_was_asked_for_is_a_slice_of_its_own() -> None:
    good, bad = Reading(answer='{"city": "Oslo"}'), Reading(answer='{"city": "Oslo"')
    async with (
        ReadingEngine(good) as base,
        ReadingEngine(bad) as small,
        guarded(settings_of(small, base)) as (harness, guard),
    ):
        await send(harness, 40, response_format={"type": "json_object"})
        evidence = guard.evidence("m", "small")
        assert evidence.tally("invalid", "json").mean == 1.0
        assert evidence.harm().measure == "invalid"


async def test_a_failing_baseline_says_nothing_about_the_variant() -> None:
    async with (
        ReadingEngine(Reading(status=500)) as base,
        ReadingEngine() as small,
        guarded(settings_of(small, base)) as (harness, guard),
    ):
        await send(harness, 5)
        assert guard.evidence("m", "small").answers == 0
        assert await ended(harness, "baseline_failed") == 5


async def test_answers_of_the_baseline_are_compared_with_a_variant_without_traffic() -> None:
    async with (
        ReadingEngine() as base,
        ReadingEngine(Reading(harm=2.0)) as small,
        guarded(settings_of(small, base, weight=0.0)) as (harness, guard),
    ):
        await send(harness, 12)
        assert "answer" in small.reading.calls  # it answered again, for nobody
        assert guard.evidence("m", "small").harm().log_evidence > ALARM


async def test_without_a_ready_baseline_the_guard_says_paused() -> None:
    async with ReadingEngine(faults=Faults(health=503)) as base, ReadingEngine() as small:
        base.faults.golden_status = 503
        async with gateway(settings_of(small, base)) as harness:
            guard = harness.app.guard
            assert guard is not None
            await send(harness, 3)
            assert await ended(harness, "paused") == 3
            assert guard.paused("m", "small") == "no worker of 'base' is ready"
            assert await harness.metric('taut_guard_paused{model="m",variant="small"}') == 1
            assert guard.evidence("m", "small").answers == 0


async def test_a_full_queue_drops_and_no_client_waits() -> None:
    slow = Reading(delay_s=30)
    async with (
        ReadingEngine(slow) as base,
        ReadingEngine() as small,
        guarded(settings_of(small, base, max_queued=2)) as (harness, _),
    ):
        async with asyncio.timeout(10):
            for number in range(8):
                body = {"model": "m", "prompt": f"q {number}", "max_tokens": 12}
                assert (await harness.post(body)).status == 200
        # One is being compared, two wait.
        await eventually(lambda: dropped(harness, 5))
        assert await harness.metric("taut_guard_queued_answers") == 2


async def test_beyond_its_share_of_cpu_time_the_sample_thins_itself_and_says_so() -> None:
    async with (
        ReadingEngine() as base,
        ReadingEngine() as small,
        guarded(settings_of(small, base, max_cpu_share=1e-6)) as (harness, guard),
    ):
        for number in range(300):
            body = {"model": "m", "prompt": f"q {number}", "max_tokens": 12}
            assert (await harness.post(body)).status == 200
        await eventually(lambda: idle(harness), 20)
        left_out = await ended(harness, "cpu_budget")
        assert 100 < left_out < 300
        await eventually(lambda: guard.evidence("m", "small").answers == 300 - left_out, 20)
        assert await harness.metric("taut_guard_sampled_ratio") < 0.9
        assert await harness.metric("taut_guard_cpu_seconds_total") > 0


async def test_what_comparisons_cost_outside_their_steps_is_charged_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each request to a worker has the loop do a millisecond more, as callbacks of sockets do."""
    burnt = 0.0
    fetch = Reader._fetch

    def burn() -> None:
        nonlocal burnt
        began = time.thread_time()
        while time.thread_time() < began + 0.001:
            pass
        burnt += time.thread_time() - began

    async def fetched(*arguments: Any) -> tuple[bytes, float]:
        asyncio.get_running_loop().call_soon(burn)
        return await fetch(*arguments)

    monkeypatch.setattr(Reader, "_fetch", fetched)
    monkeypatch.setattr("taut_service.guard.budget.WINDOW_S", 0.02)
    async with (
        ReadingEngine() as base,
        ReadingEngine() as small,
        guarded(settings_of(small, base, sample=0.1)) as (harness, guard),
    ):
        for number in range(1600):
            if number == 800:
                before, outside = guard.budget.spent_s, burnt
            body = {"model": "m", "prompt": f"q {number}", "max_tokens": 12}
            assert (await harness.post(body)).status == 200
        assert burnt - outside > 0.1
        assert guard.budget.spent_s - before > burnt - outside


async def dropped(harness: Harness, count: int) -> bool:
    return await ended(harness, "queue_full") == count


async def test_nothing_is_billed_and_only_the_share_is_drawn() -> None:
    async with (
        ReadingEngine() as base,
        ReadingEngine() as small,
        guarded(settings_of(small, base, sample=0.25)) as (harness, _),
    ):
        for number in range(200):
            body = {"model": "m", "prompt": f"q {number}", "max_tokens": 12}
            assert (await harness.post(body)).status == 200
        await eventually(lambda: idle(harness), 20)
        drawn = await ended(harness)
        assert 20 <= drawn <= 85  # five standard deviations around 50
        label = '{model="m",variant="base"}'
        assert await harness.metric(f"taut_variant_generated_tokens_total{label}") == 0
        assert await harness.metric('taut_generated_tokens_total{model="m"}') == 200 * 12


async def idle(harness: Harness) -> bool:
    return await harness.metric("taut_guard_queued_answers") == 0


async def test_the_client_gets_the_same_bytes_with_and_without_the_guard() -> None:
    async with ReadingEngine() as base, ReadingEngine() as small:
        for path, stream in (("/v1/completions", True), ("/v1/chat/completions", False)):
            body: dict[str, Any] = {"model": "m", "max_tokens": 12, "stream": stream}
            body |= (
                {"prompt": "x"}
                if "chat" not in path
                else {"messages": [{"role": "user", "content": "x"}]}
            )
            bodies = []
            for sample in (1e-12, 1.0):
                async with guarded(settings_of(small, base, sample=sample)) as (harness, _):
                    bodies.append((await harness.post(body, path)).body)
            assert bodies[0] == bodies[1]


async def test_examples_are_kept_only_if_asked_for_and_shortened(tmp_path: Path) -> None:
    folder = tmp_path / "examples"
    keep = {"directory": str(folder), "max_chars": 5, "ratio": 1.0, "max_files": 3}
    async with ReadingEngine() as base, ReadingEngine(Reading(harm=2.0)) as small:
        settings = settings_of(small, base, keep="examples", examples=keep)
        async with guarded(settings) as (harness, _):
            await send(harness, 6)
            await eventually(lambda: len(list(folder.iterdir())) == 3)
    for file in folder.iterdir():
        kept = json.loads(file.read_text())
        assert file.stat().st_mode & 0o777 == 0o600
        assert (len(kept["prompt_end"]), kept["answer_beginning"]) == (5, " tok ")
        assert kept["prompt_end"].endswith("?")
        assert kept["first_different_token"] is not None


async def test_a_replaced_candidate_begins_anew(tmp_path: Path) -> None:
    async with ReadingEngine() as base, ReadingEngine(Reading(harm=2.0)) as small:
        file = tmp_path / "gateway.yaml"
        settings = settings_of(small, base)
        document = settings.model_dump(mode="json")
        async with gateway(settings, path=file) as harness:
            await eventually(lambda: all(w.ready for _, _, w in workers(harness)))
            guard = harness.app.guard
            assert guard is not None
            await send(harness, 4)
            document["models"][0]["variants"][1]["weight"] = 0.5
            file.write_text(json.dumps(document))
            await harness.app.reloader.reload()
            assert guard.evidence("m", "small").answers == 4
            document["models"][0]["variants"][1]["provenance"] = {"recipe": "another"}
            file.write_text(json.dumps(document))
            await harness.app.reloader.reload()
            assert guard.evidence("m", "small").answers == 0


@pytest.mark.parametrize(
    ("guard", "model", "text"),
    [
        ({}, {}, "no model names the 'baseline'"),
        ({"sampel": 0.1}, {"baseline": "base"}, "sampel"),
        ({"max_kl_excess_nats": 0.6}, {"baseline": "base"}, "smaller than kl_clip_nats"),
        ({"keep": "examples"}, {"baseline": "base"}, "'examples' is needed"),
        ({}, {"baseline": "other"}, "baseline names 'other'"),
    ],
)
def test_a_wrong_section_is_refused(
    guard: dict[str, Any], model: dict[str, Any], text: str
) -> None:
    worker = [{"name": "w", "url": "http://127.0.0.1:1"}]
    variants = [
        {"name": name, "workers": [{**worker[0], "name": name}]} for name in ("base", "small")
    ]
    document = {
        "models": [{"name": "m", "max_model_len": 64, "variants": variants, **model}],
        "guard": guard,
    }
    with pytest.raises(ValidationError, match=text):
        Settings.model_validate(document)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_drawn_request_goes_the_way_of_all_others(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past ``send``, in one write: what is compared costs its client nothing."""
    if how_built() == "compiled":
        pytest.skip("replaces compiled methods: test_compiled.py runs it on Python")
    straight: list[bytes] = []
    for name in ("respond", "write_events"):
        past = getattr(ClientExchange, name)

        def noted(exchange: ClientExchange, *given: Any, past: Any = past) -> bool:
            straight.append(given[-1])
            return bool(past(exchange, *given))

        monkeypatch.setattr(ClientExchange, name, noted)
    heard: list[Any] = []
    paced = Faults(tokens=12, interval_s=0.01)
    async with (
        ReadingEngine(faults=paced) as base,
        ReadingEngine(faults=paced) as small,
        guarded(settings_of(small, base)) as (harness, guard),
    ):
        monkeypatch.setattr(guard, "_offer", lambda _, given: heard.append(given))
        body = {"model": "m", "prompt": "x", "max_tokens": 12, "stream": stream}
        answer = await harness.post(body)
        assert b"".join(heard[0].answer) == answer.body
        # The first event goes with the head.
        kept = [piece for piece in heard[0].answer if any(piece is x for x in straight)]
        assert len(kept) == (len(heard[0].answer) - 1 if stream else 1) > 0


def test_what_is_too_large_is_not_kept() -> None:
    ended: list[Heard | None] = []
    for request, answer in ((1, MAX_BYTES + 1), (MAX_BYTES + 1, 1), (1, 1)):
        call = Call(ROUTES[0], b"id", Metrics().route("m", "completions"))
        call.answer.status = 200
        tap = Tap(b"x" * request, ended.append)
        tap.hear(b"y" * answer)
        tap.finish(call)
    assert ended[:2] == [None, None]
    assert ended[2] is not None and list(ended[2].answer) == [b"y"]


async def test_other_models_and_routes_are_not_drawn() -> None:
    async with ReadingEngine() as base, ReadingEngine() as small, ReadingEngine() as lone:
        document = settings_of(small, base).model_dump(mode="json")
        worker = {"name": "lone", "url": lone.url}
        document["models"].append({"name": "lone", "max_model_len": 64, "workers": [worker]})
        async with guarded(Settings.model_validate(document)) as (harness, _):
            for body, path in (
                ({"model": "lone", "prompt": "x", "max_tokens": 12}, "/v1/completions"),
                ({"model": "m", "input": "x"}, "/v1/embeddings"),
            ):
                assert (await harness.post(body, path)).status == 200
            await send(harness, 1)
            assert await ended(harness) == 1
            assert lone.reading.calls == ["answer"]


async def test_an_answer_beyond_the_bound_is_counted_as_too_large() -> None:
    long = Faults(tokens=12, token=" t" * (MAX_BYTES // 20))
    async with (
        ReadingEngine() as base,
        ReadingEngine(faults=long) as small,
        guarded(settings_of(small, base)) as (harness, guard),
    ):
        await send(harness, 2)
        label = '{model="m",result="too_large",variant="none"}'
        assert await harness.metric(f"taut_guard_answers_total{label}") == 2
        assert guard.evidence("m", "small").answers == 0


async def test_while_clients_wait_for_admission_nothing_is_compared() -> None:
    slow = Faults(tokens=12, latency_s=0.05)
    async with ReadingEngine() as base, ReadingEngine(faults=slow) as small:
        document = settings_of(small, base).model_dump(mode="json")
        document["admission"] = {"max_inflight": 1, "max_queued": 10}
        async with guarded(Settings.model_validate(document)) as (harness, guard):
            body = {"model": "m", "prompt": "x", "max_tokens": 12}
            answers = await asyncio.gather(*(harness.post(body) for _ in range(4)))
            assert [answer.status for answer in answers] == [200] * 4
            await send(harness, 1)
            label = '{model="m",result="load",variant="none"}'
            waited = await harness.metric(f"taut_guard_answers_total{label}")
            assert 2 <= waited <= 3  # behind the last of four nobody waits
            await eventually(lambda: guard.evidence("m", "small").answers == 5 - waited)


async def test_what_a_reload_takes_away_is_forgotten_and_its_series_end(tmp_path: Path) -> None:
    """One answer of the old variant is being compared then, another waits."""
    read = asyncio.Event()

    async def held(_: float) -> None:
        await read.wait()

    async with ReadingEngine(Reading(delay_s=1, sleep=held)) as base, ReadingEngine() as small:
        file = tmp_path / "gateway.yaml"
        settings = settings_of(small, base, concurrency=1, regenerate=False)
        async with gateway(settings, path=file) as harness:
            await eventually(lambda: all(w.ready for _, _, w in workers(harness)))
            guard = harness.app.guard
            assert guard is not None
            for number in range(2):
                body = {"model": "m", "prompt": f"q {number}", "max_tokens": 12}
                assert (await harness.post(body)).status == 200
            await eventually(lambda: base.reading.calls.count("read") == 1)
            document = settings.model_dump(mode="json")
            document["models"][0]["variants"][1]["name"] = "next"
            file.write_text(json.dumps(document))
            await harness.app.reloader.reload()
            read.set()
            await send(harness, 1)
            assert guard.queued == 0 and guard.paused("m", "next") == ""
            shown = (await harness.request("GET", "/metrics")).body.decode()
            named = [line for line in shown.splitlines() if line.startswith("taut_guard_")]
            assert not any('variant="small"' in line for line in named)
            assert await ended(harness) == await ended(harness, "compared") == 1
            assert guard.evidence("m", "next").answers == 1


async def test_an_example_that_cannot_be_written_is_said_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "examples"
    keep = {"directory": str(folder), "ratio": 1.0}
    async with ReadingEngine() as base, ReadingEngine(Reading(harm=2.0)) as small:
        settings = settings_of(small, base, keep="examples", examples=keep)
        async with guarded(settings) as (harness, guard):
            folder.rmdir()
            await send(harness, 2)
            text = "guard: an example was not kept: No such file or directory"
            await eventually(lambda: caplog.text.count(text) == 2)
            assert guard.evidence("m", "small").answers == 2


async def test_a_guard_that_fails_by_itself_says_so_and_clients_are_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("taut_service.guard.guard.compare", broken)
    async with (
        ReadingEngine() as base,
        ReadingEngine() as small,
        guarded(settings_of(small, base, concurrency=1)) as (harness, guard),
    ):
        body = {"model": "m", "prompt": "x", "max_tokens": 12}
        assert (await harness.post(body)).status == 200
        stopped = "the guard has stopped: see the log"
        await eventually(lambda: guard.paused("m", "small") == stopped)
        assert await harness.metric('taut_guard_paused{model="m",variant="small"}') == 1
        assert (await harness.post(body)).status == 200
    (record,) = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert record.message == "guard: a comparison failed by itself"
    assert record.exc_info is not None and "a defect" in str(record.exc_info[1])
