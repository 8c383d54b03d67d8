"""Readings of two variants on the same tokens, against the whole distributions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from taut_service.guard.divergence import (
    Divergence,
    NotFiniteError,
    UnreadableError,
    coarse_kl,
    diverge,
    expected,
    read_distributions,
)


def kl(p: dict[int, float], q: dict[int, float]) -> float:
    return coarse_kl(expected([p])[0], q)


def top(probabilities: Any, k: int, own: int = 0) -> dict[int, float]:
    best = np.argsort(-probabilities)[:k]
    return {int(i): math.log(probabilities[i]) for i in {*best.tolist(), own}}


def test_kl_of_the_top_and_a_bucket_never_exceeds_the_whole_and_comes_near() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        logits = rng.normal(size=50) * 2
        moved = logits + rng.normal(size=50) * 0.3
        p, q = (np.exp(x) / np.exp(x).sum() for x in (logits, moved))
        whole = float((p * np.log(p / q)).sum())
        assert 0 <= kl(top(p, 5), top(q, 5)) <= whole + 1e-9
        assert kl(top(p, 50), top(q, 50)) == pytest.approx(whole, abs=1e-5)


def test_a_reading_by_hand() -> None:
    sure, unsure = {1: math.log(0.9), 2: math.log(0.05)}, {1: math.log(0.4), 2: math.log(0.5)}
    nats = 0.9 * math.log(0.9 / 0.4) + 0.05 * math.log(0.05 / 0.5) + 0.05 * math.log(0.05 / 0.1)
    assert kl(sure, unsure) == pytest.approx(nats)
    reference = expected([sure, sure, sure, unsure])
    reading = diverge(reference, [sure, unsure, unsure, unsure], kl_bound=2.0)
    assert reading == Divergence(pytest.approx(2 * nats / 4 / 2.0), 0.5, 1, 4)
    assert diverge(expected([sure]), [unsure], kl_bound=0.1).kl == 1.0
    assert diverge(expected([sure]), [sure], kl_bound=0.1) == (0.0, 0.0, None, 1)


@pytest.mark.parametrize(
    ("ours", "theirs", "differs"),
    [
        ({3: -1.0, 7: -1.0}, {7: -1.0, 3: -1.0, 9: -2.0}, False),
        ({3: -1.0, 7: -1.0}, {7: -1.0, 3: -1.1}, True),
        ({7: -1.0, 3: -1.1}, {3: -1.0, 7: -1.0}, True),
        ({7: -1.0, 3: -1.1}, {9: -1.0, 7: -1.0}, False),
        ({7: -1.0}, {9: -1.0}, True),
    ],
)
def test_of_equally_probable_tokens_the_smaller_one_counts_at_both(
    ours: dict[int, float], theirs: dict[int, float], differs: bool
) -> None:
    assert diverge(expected([ours]), [theirs], 1.0).disagreement == float(differs)


def test_tokens_in_common_with_nobody() -> None:
    assert kl({1: 0.0}, {2: 0.0}) == 0.0  # the bucket is all there is: no evidence made up
    assert diverge(expected([{1: 0.0}]), [{2: 0.0}], 1.0).disagreement == 1.0


def document(*entries: Any) -> dict[str, Any]:
    return {"choices": [{"prompt_logprobs": list(entries)}]}


ENTRY = {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "x"}}


def test_distributions_of_the_answers_places() -> None:
    assert read_distributions(document(None, ENTRY, ENTRY), 2, 3) == [{7: -0.5}]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({}, "no 'prompt_logprobs'"),
        (document(None, ENTRY), "entry for each token"),
        (document(None, None, None), "not as vLLM writes"),
        (document(None, ENTRY, {}), "empty"),
        (document(None, ENTRY, {"x": {"logprob": 1}}), "not as vLLM writes"),
        (document(None, ENTRY, {"7": {"logprob": 10**400}}), "not as vLLM writes"),
    ],
)
def test_what_is_no_answer_is_named(answer: Any, error: str) -> None:
    with pytest.raises(UnreadableError, match=error) as caught:
        read_distributions(answer, 1, 3)
    assert not isinstance(caught.value, NotFiniteError)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, 0.5])
def test_a_logprob_that_is_no_number_is_told_apart(value: float) -> None:
    with pytest.raises(NotFiniteError):
        read_distributions(document(None, {"7": {"logprob": value}}), 1, 2)
