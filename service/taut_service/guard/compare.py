"""Compares one answer of live traffic: both variants read it, and both have answered the request.

The baseline reads it twice. The difference of its two readings is the noise floor, measured on the
same text over the same way: a worker's batching alone moves log-probabilities. What counts is how
much further the candidate is from the baseline than the baseline from itself.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from taut_service.config.settings import GuardSettings
from taut_service.guard.answers import answer_of, read_answer
from taut_service.guard.behaviour import Answer, faults, kind_of
from taut_service.guard.divergence import FULL, NotFiniteError
from taut_service.guard.evidence import DISAGREEMENT, KL
from taut_service.guard.prompts import prompt_of, shown_of
from taut_service.guard.reader import BusyError, Reader, ReadError
from taut_service.guard.reading import SMALL_BYTES, diverge_in_turns
from taut_service.guard.sampling import drawn_apart, leaves_to_worker, surprise
from taut_service.guard.tap import Heard

_Result = TypeVar("_Result")
COMPARED = "compared"
OF_VARIANT = "disagreement_of_variant"
"""Measure: share of places where variant and baseline choose differently, noise included."""
_NOT_REPEATED = ("stream", "stream_options", "model", "request_id")


@dataclass
class Comparison:
    """What came of it.

    Args:
        result: ``compared``, or why not; a metric label.
        kind: slice of the request.
        values: measure → observation.
        tokens: that were compared.
        first: place of the first different choice, None without.
        length_ratio: candidate's answer over the baseline's, in characters; None if not known.
        why: for a person, of what failed or differs.
        prompt: text or conversation, for examples.
        answer: text, for examples.
    """

    result: str
    kind: str = ""
    values: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    first: int | None = None
    length_ratio: float | None = None
    why: str = ""
    prompt: str = ""
    answer: str = ""


async def compare(
    heard: Heard,
    candidate: Reader,
    baseline: Reader,
    settings: GuardSettings,
    *,
    by_candidate: bool,
) -> Comparison:
    """Compare the variants on one answer.

    Args:
        heard: request and answer.
        candidate: reads as the variant that is guarded.
        baseline: reads as its baseline.
        settings: sizes and bounds.
        by_candidate: the candidate gave this answer, else the baseline did.

    Returns:
        The comparison; failures of workers are results, not errors.
    """
    small = len(heard.body) + sum(map(len, heard.answer)) <= SMALL_BYTES
    request, answer = _parse(heard) if small else await asyncio.to_thread(_parse, heard)
    prompt = None if request is None else prompt_of(request)
    if request is None or answer is None or prompt is None:
        return Comparison("unsupported")
    shown = shown_of(prompt)
    found = Comparison(COMPARED, kind_of(request), prompt=shown, answer=answer.text)
    try:
        text = "" if answer.tool_calls else answer.text
        served = await _read(found, prompt, text, candidate, baseline, settings)
        if settings.regenerate and found.result == COMPARED:
            if by_candidate:
                again = await _of_baseline(_answer_again(baseline, heard.path, request))
                _judge_behaviour(found, request, answer, again)
            else:
                again = await _answer_again(candidate, heard.path, request)
                _judge_behaviour(found, request, again, answer)
            if served is not None and leaves_to_worker(request):
                other = await _of_baseline(_surprise_of(again, served.prompt, baseline, settings))
                if other is not None:
                    ours = served.surprise
                    pair = (ours, other) if by_candidate else (other, ours)
                    found.values |= drawn_apart(*pair)
    except BusyError:
        return Comparison("load")
    except _BaselineError as error:
        return Comparison("baseline_failed", why=str(error))
    except ReadError as error:
        found.result, found.why = "candidate_failed", str(error)
        found.values = {"failed": 1.0}
        return found
    if found.result == COMPARED:
        found.values.setdefault("failed", 0.0)
    return found


class _BaselineError(Exception):
    """The baseline failed: nothing is learnt about the candidate."""


async def _of_baseline(work: Awaitable[_Result]) -> _Result:
    try:
        return await work
    except (ReadError, NotFiniteError) as error:
        raise _BaselineError(str(error)) from error


def _parse(heard: Heard) -> tuple[dict[str, Any] | None, Answer | None]:
    try:
        request = json.loads(heard.body)
    except (ValueError, RecursionError):
        return None, None
    return (request if isinstance(request, dict) else None), read_answer(b"".join(heard.answer))


async def _tokens(
    reader: Reader, prompt: dict[str, Any] | list[int], text: str
) -> tuple[list[int], list[int]]:
    """Return the tokens of prompt and answer, cut apart where the answer began."""
    before = prompt if isinstance(prompt, list) else await reader.tokens(prompt)
    return before, await _tokens_of(reader, text) if text else []


async def _tokens_of(reader: Reader, text: str) -> list[int]:
    return await reader.tokens({"prompt": text, "add_special_tokens": False})


class _Served(NamedTuple):
    """Tokens of a prompt, and how surprising the baseline finds what was answered, in nats."""

    prompt: list[int]
    surprise: float


async def _read(
    found: Comparison,
    prompt: dict[str, Any] | list[int],
    text: str,
    candidate: Reader,
    baseline: Reader,
    settings: GuardSettings,
) -> _Served | None:
    """Have both read an answer; of one without text, make tokens of its prompt alone."""
    before, after = await _of_baseline(_tokens(baseline, prompt, text))
    if (before, after) != await _tokens(candidate, prompt, text):
        found.why = "the two variants make different tokens of the same text"
        found.values = {KL: FULL, DISAGREEMENT: FULL}
        return None
    if not text:
        return None
    after = after[: settings.max_answer_tokens]
    tokens = before + after
    if not before or not after or len(tokens) > settings.max_tokens:
        found.result = "too_long" if before and after else "unsupported"
        return None
    first, first_s = await _of_baseline(baseline.distributions(tokens, len(before), settings.top_k))
    try:
        theirs, seconds = await candidate.distributions(tokens, len(before), settings.top_k)
    except NotFiniteError as error:
        found.why = str(error)
        found.values = {KL: FULL, DISAGREEMENT: FULL}
        return None
    again, again_s = await _of_baseline(baseline.distributions(tokens, len(before), settings.top_k))
    reading, floor = await diverge_in_turns(first, (theirs, again), settings.kl_clip_nats)
    slow = seconds > settings.max_slowdown * (first_s + again_s) / 2
    found.tokens, found.first = reading.tokens, reading.first
    found.values = {
        KL: reading.kl - floor.kl,
        DISAGREEMENT: reading.disagreement - floor.disagreement,
        "slow": float(slow),
        OF_VARIANT: reading.disagreement,
        "disagreement_of_baseline": floor.disagreement,
    }
    found_surprise = surprise(first, after)
    return None if found_surprise is None else _Served(before, found_surprise)


async def _surprise_of(
    answer: Answer, prompt: list[int], reader: Reader, settings: GuardSettings
) -> float | None:
    """Return how surprising a variant finds a whole answer; None for what cannot be read."""
    if not answer.text or answer.tool_calls:
        return None
    after = await _tokens_of(reader, answer.text)
    after = after[: settings.max_answer_tokens]
    if not after or len(prompt) + len(after) > settings.max_tokens:
        return None
    told, _ = await reader.distributions(prompt + after, len(prompt), top_k=0)
    return surprise(told, after)


async def _answer_again(reader: Reader, path: str, request: dict[str, Any]) -> Answer:
    fields = {name: value for name, value in request.items() if name not in _NOT_REPEATED}
    document = await reader.ask(path, fields)
    answer = answer_of([document])
    if answer is None:
        raise ReadError(f"{path} answered without a choice")
    return answer


def _judge_behaviour(
    found: Comparison, request: dict[str, Any], candidate: Answer, baseline: Answer
) -> None:
    theirs = faults(request, candidate, baseline)
    ours = faults(request, baseline, candidate)
    for name, fault in theirs.items():
        if fault is not None:
            found.values[name] = float(fault) - float(bool(ours[name]))
    lengths = len(candidate.text), len(baseline.text)
    if min(lengths) > 0:
        found.length_ratio = lengths[0] / lengths[1]
