"""How the pace of two variants is compared: intervals of medians, by simulation."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from taut_service.rollout.decide import decide
from taut_service.rollout.pace import NEWEST, Pace, median_of

from .test_decide import GOOD, SETTINGS, STATE

RUNS = 2000
LIMIT = SETTINGS.max_first_token_ratio


def times(draw: random.Random, count: int, scale: float = 1.0, spread: float = 0.4) -> list[float]:
    """Log-normal seconds, one in ten of a slow kind of prompt."""
    slow = (4.0 if draw.random() < 0.1 else 1.0 for _ in range(count))
    return [0.1 * scale * kind * draw.lognormvariate(0, spread) for kind in slow]


def true_median(spread: float = 0.4) -> float:
    """The median of :func:`times`, by bisection of its distribution."""

    def below(log: float) -> float:
        ends = (log / spread, (log - math.log(4.0)) / spread)
        nine, one = (0.5 + 0.5 * math.erf(at / math.sqrt(2)) for at in ends)
        return 0.9 * nine + 0.1 * one

    low, high = -1.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < 0.5 else (low, middle)
    return 0.1 * math.exp(low)


@pytest.mark.parametrize("count", [6, 20, 65, 256])
def test_the_interval_of_a_median_holds_it_as_often_as_it_says(count: int) -> None:
    draw, truth = random.Random(count), true_median()
    found = [median_of(times(draw, count)) for _ in range(RUNS)]
    above = sum(one.low_s > truth for one in found) / RUNS
    below = sum(one.high_s < truth for one in found) / RUNS
    chance = 3 * math.sqrt(0.025 * 0.975 / RUNS)
    assert max(above, below) <= 0.025 + chance
    if count > 20:  # of few times the ranks are coarse, and the interval is wider than asked
        assert above + below >= 0.02


@pytest.mark.parametrize("count", [1, 5])
def test_too_few_times_prove_nothing(count: int) -> None:
    found = median_of([0.1] * count)
    assert (found.low_s, found.estimate_s, found.high_s) == (0.0, 0.1, math.inf)


def pace(draw: random.Random, count: int, ratio: float) -> Pace:
    made = Pace()
    for first, rest in zip(times(draw, count, ratio), times(draw, count, ratio), strict=True):
        made.streamed(first, rest / 10)
    return made


def share_promoted(ratio: float, streams: int, runs: int = 200) -> float:
    draw, promoted = random.Random(f"{ratio} {streams}"), 0
    for _ in range(runs):
        medians = {
            "candidate": pace(draw, streams, ratio).medians(),
            "baseline": pace(draw, streams, 1.0).medians(),
        }
        promoted += decide(STATE, replace(GOOD, **medians), SETTINGS).action == "promote"
    return promoted / runs


@pytest.mark.parametrize("streams", [20, 64, NEWEST])
def test_a_candidate_at_the_limit_is_seldom_promoted(streams: int) -> None:
    """By its medians alone every fourth would be: for both a coin is thrown."""
    assert share_promoted(LIMIT, streams) <= 0.05


def test_one_that_is_as_fast_is_promoted_once_there_are_streams_enough() -> None:
    assert share_promoted(1.0, 64) >= 0.6
    assert share_promoted(1.0, NEWEST, runs=100) == 1.0
