"""Answers with log-probabilities are read in pieces, exactly as they would be whole."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taut_service.guard import reading
from taut_service.guard.divergence import NotFiniteError, UnreadableError, diverge, expected
from taut_service.guard.reading import PLACES, distributions_of, diverge_in_turns

TOKENS = [
    "x",
    "}},{",
    '"}},{"',
    "}}]",
    '}},{"a',
    "\\",
    "\u00e9\ufffd",
    '"prompt_logprobs":[null,{"',
]
COMPACT = (",", ":")


def document(entries: list[Any], separators: tuple[str, str] = COMPACT) -> bytes:
    """Return an answer as vLLM writes it: one choice, usage behind it."""
    choice = {"index": 0, "text": " x", "prompt_logprobs": [None, *entries]}
    answer = {"id": "1", "choices": [choice], "usage": {"prompt_tokens": len(entries) + 1}}
    return json.dumps(answer, separators=separators).encode()


def entry(log: float, text: str = "x", token: int = 7) -> dict[str, Any]:
    return {str(token): {"logprob": log, "rank": 1, "decoded_token": text}}


@given(
    words=st.lists(st.sampled_from(TOKENS), min_size=1, max_size=3 * PLACES),
    share=st.floats(0, 1),
    separators=st.sampled_from([COMPACT, (", ", ": ")]),
)
async def test_pieces_give_what_the_whole_document_holds(
    words: list[str], share: float, separators: tuple[str, str]
) -> None:
    entries = [entry(-0.5 - place, word) for place, word in enumerate(words)]
    prompt = 1 + int(share * len(words))
    found = await distributions_of(document(entries, separators), prompt, len(words) + 1)
    assert found == [{7: -0.5 - place} for place in range(prompt - 1, len(words))]


async def test_only_the_places_of_the_answer_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    read = reading._read

    def noted(piece: bytes) -> Any:
        parsed.append(len(json.loads(piece)))
        return read(piece)

    monkeypatch.setattr(reading, "_read", noted)
    data = document([entry(-1.0)] * 2000)
    assert len(await distributions_of(data, 1901, 2001)) == 100
    assert parsed == [PLACES, 100 - PLACES]


async def test_the_loop_has_its_turns_meanwhile() -> None:
    data = document([entry(-1.0, "token") for _ in range(4000)])
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    found = await distributions_of(data, 1, 4001)
    assert turns >= 4000 // PLACES
    turns = 0
    assert [part.tokens for part in await diverge_in_turns(found, [found], 1.0)] == [4000]
    assert turns >= 4000 // PLACES
    task.cancel()


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"no", ValueError),
        (b'{"choices": []}', UnreadableError),
        (document([entry(-1.0)]), UnreadableError),
        (document([entry(-1.0), entry(math.nan)]), NotFiniteError),
        (document([entry(-1.0), entry(0.5)]), NotFiniteError),
        (document([entry(-1.0), {}]), UnreadableError),
        (document([entry(-1.0), entry(-1.0)])[:-60], ValueError),
    ],
)
async def test_what_is_no_answer_is_refused(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        await distributions_of(data, 1, 3)


async def test_turns_change_no_figure() -> None:
    rng = np.random.default_rng(1)
    first, *others = ([draw(rng) for _ in range(2 * PLACES + 9)] for _ in range(3))
    others[0][:40] = first[:40]
    turns = await diverge_in_turns(first, others, 0.5)
    for found, other in zip(turns, others, strict=True):
        whole = diverge(expected(first), other, 0.5)
        assert found.kl == pytest.approx(whole.kl)
        assert found.disagreement == pytest.approx(whole.disagreement)
        assert (found.first, found.tokens) == (whole.first, whole.tokens)
    assert turns[0].first is not None and turns[0].first >= 40


@pytest.mark.parametrize("prompt", [1, 2, 150])
async def test_an_answer_with_fewer_entries_than_were_sent_is_refused(prompt: int) -> None:
    """Those at its end belong to other tokens then."""
    with pytest.raises(UnreadableError, match="entry for each token"):
        await distributions_of(document([entry(-1.0)] * 198), prompt, 200)


def draw(rng: np.random.Generator) -> dict[int, float]:
    logits = rng.normal(size=6)
    logs = logits - np.log(np.exp(logits).sum())
    return dict(enumerate(logs.tolist()))
