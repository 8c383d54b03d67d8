"""What workers do wrong when the guard asks them: said in words, and never taken for load."""

from __future__ import annotations

import asyncio

import pytest
from mock_engine import Faults
from mock_reader import Reading, ReadingEngine

from taut_service.config.settings import Settings
from taut_service.guard.reader import Reader

from .test_guard import ended, guarded, send, settings_of

EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n" + b'{"choices": []}'
LISTED = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]"


@pytest.mark.parametrize(
    ("reading", "faults", "words"),
    [
        (Reading(tokenized=b'{"count": 3}'), Faults(), "/tokenize answered without 'tokens'"),
        (Reading(tokenized=b'{"tokens": ["a"]}'), Faults(), "/tokenize answered without 'tokens'"),
        (Reading(tokenized=b"<html>"), Faults(), "/tokenize answered with what is no JSON"),
        (Reading(raw=b"<html>"), Faults(), "/v1/completions answered with what is no JSON"),
        (Reading(status=500), Faults(), "/v1/completions answered with status 500"),
        (Reading(), Faults(raw=EMPTY), "/v1/completions answered without a choice"),
        (Reading(), Faults(raw=LISTED), "/v1/completions answered without a choice"),
    ],
)
async def test_what_a_candidate_does_wrong_is_logged_in_words(
    reading: Reading, faults: Faults, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        ReadingEngine() as base,
        ReadingEngine(reading, faults) as small,
        guarded(settings_of(small, base, weight=0.0)) as (harness, guard),
    ):
        await send(harness, 1)
        assert await ended(harness, "candidate_failed") == 1
        assert guard.evidence("m", "small").tally("failed").mean == 1
    assert f"guard: small of m: candidate_failed: {words}" in caplog.text


@pytest.mark.parametrize("status", [429, 503])
async def test_a_candidate_that_is_too_busy_has_not_failed(status: int) -> None:
    async with (
        ReadingEngine() as base,
        ReadingEngine(Reading(status=status)) as small,
        guarded(settings_of(small, base)) as (harness, guard),
    ):
        await send(harness, 3)
        assert await ended(harness, "load") == 3
        assert guard.evidence("m", "small").answers == 0


async def test_a_comparison_does_not_use_up_the_probe_of_a_half_open_breaker() -> None:
    async with ReadingEngine() as base, ReadingEngine() as small:
        document = settings_of(small, base).model_dump(mode="json")
        document["routing"]["breaker"] = {"failures": 1, "open_s": 0.05}
        async with guarded(Settings.model_validate(document)) as (harness, guard):
            variant = harness.app.reloader.current.models["m"].variants["small"]
            (worker,) = variant.workers
            worker.breaker.failed(probe=False)
            await asyncio.sleep(0.06)
            assert worker.breaker.state == "half_open"
            assert await Reader(variant, guard.settings).tokens({"prompt": "a"}) == [94, 97]
            # A client's request may still be the one that tries it.
            assert (worker.breaker.state, worker.breaker.lets_through()) == ("half_open", True)
