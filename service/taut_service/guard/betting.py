"""Tests of a bounded mean that may be looked at after every observation, for ever.

Bet a share of a capital of 1 on each observation against "the mean is at most m": it becomes
``1 + b (x - m)`` times as much, ``b >= 0`` small enough that nothing is ever owed. If the bet is
fair or unfavourable, whatever came before, the capital is a non-negative supermartingale, and it
ever reaches ``1 / alpha`` with a probability of at most ``alpha`` (Ville 1939). So a capital is
evidence that needs no plan of when to look: an e-process. Source: Waudby-Smith and Ramdas,
Estimating means of bounded random variables by betting, 2023 (arXiv:2010.09686), §4.

The capital is spread over a few fixed bets, "diversified Kelly betting" there: a mean of
supermartingales is one, and the best bet of the grid carries the rest. Fixed bets lose a constant
factor to adaptive ones and make the capital a function of the :class:`.tally.Tally` alone.

Everything is in logarithms; ``below`` mirrors ``above``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from taut_service.guard.tally import RESOLUTION, Tally

SHARES = tuple(0.98 * 2.0**-k for k in range(8))
"""Bets as shares of the largest that cannot ruin."""
_HARMONIC = sum(1.0 / (k + 1) for k in range(len(SHARES)))
WEIGHTS = tuple(1.0 / (k + 1) / _HARMONIC for k in range(len(SHARES)))
"""Of the capital, at the start. Larger bets get more: they decide what can be decided soon."""
_BISECTIONS = 14
"""Halvings of [-1, 1]: the ends of an interval are exact to about a step of the grid."""
_FARTHEST = 1.0 - 1.0 / RESOLUTION
"""A mean of 1 itself leaves nothing to bet on."""


class BetLogs:
    """The log of what each bet of :data:`SHARES` has made of 1; those of parts add up.

    Args:
        bound: within (-1, 1).
        side: +1 bets that the mean is above it, -1 below.
    """

    def __init__(self, bound: float, side: int = +1) -> None:
        self._bound = bound
        self._side = side
        self.logs = [0.0] * len(SHARES)

    def add(self, step: int, times: int) -> None:
        """Bet on a value of the grid, seen so many times."""
        won = _won(self._bound, self._side, step)
        self.logs = [log + times * more for log, more in zip(self.logs, won, strict=True)]


@lru_cache(maxsize=4096)
def _won(bound: float, side: int, step: int) -> tuple[float, ...]:
    """Return what each bet makes of 1 by one value; most answers have the same few values."""
    gain = side * (step / RESOLUTION - bound)
    # The worst observation for a bet above is -1, for one below +1; both lose 1 + side * bound.
    # With bets that grow like its inverse, capital falls as the bound moves towards the data.
    lost = 1.0 + side * bound
    return tuple(math.log1p(share / lost * gain) for share in SHARES)


def log_above(tally: Tally, bound: float) -> float:
    """Return the log of the capital won against "the mean is at most ``bound``".

    Args:
        tally: what was seen.
        bound: within (-1, 1).
    """
    return _log_capital(tally, bound, +1)


def log_below(tally: Tally, bound: float) -> float:
    """Return the log of the capital won against "the mean is at least ``bound``"."""
    return _log_capital(tally, bound, -1)


def _log_capital(tally: Tally, bound: float, side: int) -> float:
    bets = BetLogs(bound, side)
    for step, times in tally.counts.items():
        bets.add(step, times)
    return mixture(bets.logs)


def mixture(logs: Sequence[float]) -> float:
    """Return the log of the capital that all bets together have made of 1."""
    return log_mean(logs, WEIGHTS)


def log_mean(logs: Sequence[float], weights: Iterable[float]) -> float:
    """Return the log of the mean of e-values, itself an e-value however they depend.

    Source: Vovk and Wang, E-values: calibration, combination and applications, 2021, §3.

    Args:
        logs: of each; at least one.
        weights: shares that sum up to 1.
    """
    top = max(logs)
    return top + math.log(
        sum(share * math.exp(log - top) for share, log in zip(weights, logs, strict=True))
    )


def interval(tally: Tally, alpha: float) -> tuple[float, float]:
    """Return a confidence sequence's current interval: it holds the mean at all times at once.

    It is the set of means that neither side's capital has refuted at ``alpha / 2``.

    Args:
        tally: what was seen.
        alpha: the probability that the mean is ever outside.

    Returns:
        Lower and upper end, in [-1, 1].
    """
    bar = math.log(2.0 / alpha)
    return (
        _edge(lambda bound: log_above(tally, bound) < bar, tally.mean, -_FARTHEST),
        _edge(lambda bound: log_below(tally, bound) < bar, tally.mean, +_FARTHEST),
    )


def _edge(possible: Callable[[float], bool], inside: float, outside: float) -> float:
    """Return where a run of possible means that begins at ``inside`` ends."""
    if possible(outside):
        return math.copysign(1.0, outside)
    inside = max(-_FARTHEST, min(_FARTHEST, inside))
    for _ in range(_BISECTIONS):
        middle = (inside + outside) / 2
        if possible(middle):
            inside = middle
        else:
            outside = middle
    return outside
