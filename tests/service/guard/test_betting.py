"""The sequential tests: no false alarm however long they run, and how soon harm is seen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from taut_service.guard.betting import SHARES, WEIGHTS, interval, log_above, log_below, log_mean
from taut_service.guard.tally import RESOLUTION, Tally, step_of

Draw = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]
BOUND, ALPHA = 0.04, 0.05
RUNS, LENGTH = 10_000, 800

# Each has the mean BOUND exactly, the hardest null there is: nothing, everything or noise around.
NULLS: dict[str, Draw] = {
    "rare and total": lambda rng, n: (rng.random(n) < BOUND).astype(float),
    "noise of both signs": lambda rng, n: rng.uniform(-0.2, 0.2 + 2 * BOUND, n),
    "constant": lambda rng, n: np.full(n, BOUND),
    "skewed": lambda rng, n: BOUND * rng.exponential(1.0, n).clip(max=20),
    "ruinous": lambda rng, n: np.where(rng.random(n) < (1 + BOUND) / 2, 1.0, -1.0),
}


def on_the_grid(
    rng: np.random.Generator, values: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Round to a tally's grid, but up or down at random, so that the mean stays where it was."""
    return np.floor(values * RESOLUTION + rng.random(values.shape)) / RESOLUTION


def greatest_logs(draw: Draw, side: int, runs: int, length: int) -> npt.NDArray[np.float64]:
    """Return the greatest log capital that each run ever had, from the formula by itself."""
    rng = np.random.default_rng(20)
    bets = np.array(SHARES) / (1 + side * BOUND)
    logs = np.zeros((runs, len(bets)))
    best = np.zeros(runs)
    for _ in range(length):
        gain = side * (on_the_grid(rng, draw(rng, runs)) - BOUND)
        logs += np.log1p(gain[:, None] * bets)
        top = logs.max(axis=1)
        best = np.maximum(best, top + np.log(np.exp(logs - top[:, None]) @ np.array(WEIGHTS)))
    return best


@pytest.mark.parametrize("side", [1, -1], ids=["above", "below"])
@pytest.mark.parametrize("name", NULLS)
def test_false_alarms_stay_below_alpha_at_whatever_time_one_looks(name: str, side: int) -> None:
    best = greatest_logs(NULLS[name], side, RUNS, LENGTH)
    share = float((best >= math.log(1 / ALPHA)).mean())
    print(f"{name}, side {side:+d}: {share:.4f} false alarms in {RUNS} runs of {LENGTH}")
    # Ville's bound holds for the true share: three standard errors for that of 10,000 runs.
    assert share <= ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / RUNS)


@pytest.mark.parametrize("side", [1, -1], ids=["above", "below"])
@pytest.mark.parametrize(
    ("worst", "chance"), [(0.0, BOUND), (-1.0, (1 + BOUND) / 2)], ids=["rare and total", "ruinous"]
)
def test_false_alarms_stay_below_alpha_over_twenty_thousand_answers(
    worst: float, chance: float, side: int
) -> None:
    """Looked at after each block of answers; of two values, how many were the greater one is all
    that a block has to be drawn by."""
    rng, block, blocks = np.random.default_rng(21), 100, 200
    bets = np.array(SHARES) / (1 + side * BOUND)
    won, lost = (np.log1p(bets * side * (value - BOUND)) for value in (1.0, worst))
    logs, best = np.zeros((RUNS, len(bets))), np.zeros(RUNS)
    for _ in range(blocks):
        ones = rng.binomial(block, chance, RUNS)[:, None]
        logs += ones * won + (block - ones) * lost
        top = logs.max(axis=1)
        best = np.maximum(best, top + np.log(np.exp(logs - top[:, None]) @ np.array(WEIGHTS)))
    share = float((best >= math.log(1 / ALPHA)).mean())
    print(f"side {side:+d}: {share:.4f} false alarms in {RUNS} runs of {block * blocks}")
    assert share <= ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / RUNS)


def test_a_test_that_looks_at_every_observation_naively_would_be_noticed() -> None:
    """The simulation can fail: a t-test at the same alpha, looked at each time, does."""
    rng = np.random.default_rng(3)
    values = rng.uniform(-0.2, 0.2 + 2 * BOUND, (2_000, 500)) - BOUND
    n = np.arange(1, 501)
    z = values.cumsum(axis=1) / np.sqrt(n * (0.4 + 2 * BOUND) ** 2 / 12)
    assert (z[:, 20:].max(axis=1) > 1.645).mean() > 3 * ALPHA


HARMS: dict[str, tuple[Draw, int]] = {
    # What an answer's excess looks like, and the delay in answers that is allowed for.
    "all wrong": (lambda rng, n: rng.uniform(0.8, 1.0, n), 12),
    "a fifth wrong": (lambda rng, n: rng.normal(0.2, 0.1, n), 60),
    "twice the bound": (lambda rng, n: rng.normal(2 * BOUND, 0.05, n), 160),
}


@pytest.mark.parametrize("name", HARMS)
def test_the_median_delay_until_harm_is_seen(name: str) -> None:
    draw, allowed = HARMS[name]
    delays = []
    for seed in range(101):
        rng, tally = np.random.default_rng(seed), Tally()
        for value in draw(rng, 400):
            tally.add(float(value))
            if log_above(tally, BOUND) >= math.log(1 / ALPHA):
                break
        delays.append(tally.size)
    median = sorted(delays)[50]
    print(f"{name}: median delay {median} answers")
    assert median <= allowed
    assert max(delays) < 400


def test_capital_is_the_mean_over_bets_of_the_product_of_their_gains() -> None:
    values = [0.3, -0.1, 0.05, 0.05, -0.7, 1.0]
    tally = Tally(Counter(step_of(value) for value in values))
    for side, log in ((1, log_above), (-1, log_below)):
        capitals = [
            math.prod(1 + s / (1 + side * 0.1) * side * (value - 0.1) for value in values)
            for s in SHARES
        ]
        mean = sum(w * c for w, c in zip(WEIGHTS, capitals, strict=True))
        assert log(tally, 0.1) == pytest.approx(math.log(mean))
    assert sum(WEIGHTS) == pytest.approx(1)


def test_intervals_always_hold_the_mean_and_shrink() -> None:
    missed, widths = 0, []
    for seed in range(200):
        rng, tally = np.random.default_rng(seed), Tally()
        outside = False
        for n in range(1, 401):
            # Hundredths have the mean 0.1, too; an interval takes time for each different value.
            tally.add(round(float(rng.uniform(-0.1, 0.3)), 2))
            if n in (10, 50, 100, 200, 400):
                low, high = interval(tally, ALPHA)
                assert -1 <= low <= tally.mean <= high <= 1
                outside |= not low <= 0.1 <= high
        missed += outside
        widths.append(high - low)
    assert missed / 200 <= ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / 200)
    assert sorted(widths)[100] < 0.12


@pytest.mark.parametrize(
    ("counts", "expected"),
    [({}, (-1.0, 1.0)), ({1000: 900}, (0.99, 1.0)), ({-1000: 900}, (-1.0, -0.99))],
)
def test_intervals_at_the_ends(counts: dict[int, int], expected: tuple[float, float]) -> None:
    assert interval(Tally(counts), ALPHA) == pytest.approx(expected, abs=0.005)


def test_order_and_place_do_not_matter() -> None:
    one, two, both = Tally(), Tally(), Tally()
    for value in (0.1, -0.3, 0.25):
        both.merge({one.add(value): 1})
    for value in (0.9, 0.1):
        both.merge({two.add(value): 1})
    two.merge(one.counts)
    assert (two.counts, two.size, two.mean) == (both.counts, 5, pytest.approx(0.21))
    assert log_above(two, BOUND) == log_above(Tally(both.counts), BOUND)


def test_values_outside_the_bounds_are_clipped_and_nan_is_refused() -> None:
    tally = Tally()
    assert [tally.add(x) for x in (7.0, -math.inf, 0.00049, 0.0016)] == [1000, -1000, 0, 2]
    with pytest.raises(ValueError, match="not a number"):
        tally.add(math.nan)
    assert tally.size == 4


def test_the_mean_of_e_values() -> None:
    assert log_mean([math.log(3), math.log(1)], [0.5, 0.5]) == pytest.approx(math.log(2))
    assert log_mean([math.log(8), -800.0], [0.25, 0.75]) == pytest.approx(math.log(2))
