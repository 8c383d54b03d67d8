"""What of an answer is compared, and what is left out by name."""

from __future__ import annotations

import pytest
from mock_reader import Reading, ReadingEngine

from taut_service.guard.compare import compare
from taut_service.guard.reader import Reader
from taut_service.guard.tap import Heard

from .test_guard import ended, guarded, send, settings_of

BODY, ANSWER = b'{"prompt": "hi"}', b'{"choices": [{"text": "ho"}]}'


UNSUPPORTED = [
    (b"{", ANSWER),
    (b"[" * 20_000, ANSWER),
    (b'["hi"]', ANSWER),
    (b'{"prompt": ["hi", "ho"]}', ANSWER),
    (BODY, b"{"),
    (BODY, b'data: {"choices": [{"text": "ho"}]},{}\n\n'),
]


async def test_what_is_no_single_text_and_answer_asks_nobody() -> None:
    async with (
        ReadingEngine() as base,
        ReadingEngine() as small,
        guarded(settings_of(small, base)) as (harness, guard),
    ):
        variants = harness.app.reloader.current.models["m"].variants
        readers = [Reader(variants[name], guard.settings) for name in ("small", "base")]
        for body, answer in UNSUPPORTED:
            heard = Heard("m", "small", "/v1/completions", body, [answer])
            found = await compare(heard, *readers, guard.settings, by_candidate=True)
            assert (found.result, found.values) == ("unsupported", {}), (body[:40], answer)
        assert base.reading.calls == small.reading.calls == []


async def test_a_text_beyond_max_tokens_is_counted_as_too_long_and_not_read() -> None:
    async with (
        ReadingEngine() as base,
        ReadingEngine() as small,
        guarded(settings_of(small, base, max_tokens=40)) as (harness, guard),
    ):
        await send(harness, 2)
        assert await ended(harness, "too_long") == 2
        assert guard.evidence("m", "small").answers == 0
        assert {*base.reading.calls, *small.reading.calls} == {"/tokenize", "answer"}


async def test_a_prompt_without_tokens_is_not_compared() -> None:
    nothing = b'{"tokens": []}'
    async with (
        ReadingEngine(Reading(tokenized=nothing)) as base,
        ReadingEngine(Reading(tokenized=nothing)) as small,
        guarded(settings_of(small, base)) as (harness, guard),
    ):
        await send(harness, 2)
        assert await ended(harness, "unsupported") == 2
        assert guard.evidence("m", "small").answers == 0


@pytest.mark.parametrize(
    ("answer", "judged"),
    [("abc", 2), ("", 0), ("abc" * 100, 0)],
    ids=["short", "empty", "too long"],
)
async def test_an_answer_that_cannot_be_read_says_nothing_about_the_temperature(
    answer: str, judged: int
) -> None:
    """The candidate answers again, for nobody; the rest of the comparison counts."""
    async with (
        ReadingEngine(Reading(temperature=1.0)) as base,
        ReadingEngine(Reading(answer=answer)) as small,
        guarded(settings_of(small, base, weight=0.0, max_tokens=100)) as (harness, guard),
    ):
        await send(harness, 2)
        evidence = guard.evidence("m", "small")
        assert (evidence.tally("kl").size, evidence.tally("warmer").size) == (2, judged)
