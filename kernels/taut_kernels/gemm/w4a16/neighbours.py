"""Whether ours wins on a shape nobody measured: what its neighbours did, less what that may be off.

A card's measured shapes tell a new one's ratio (vLLM's time ÷ ours) by the three nearest in (log N,
log K), the nearer the more. How far such a word may be off is found by leaving each measured shape
out: the largest over-estimate of all is the bound. It was found at distances up to some largest;
for shapes that lie farther from everything measured, or where few were, there is no word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

NEIGHBOURS = 3
LEAST_SHAPES = 16
"""Fewer bound nothing."""
_SMALLEST = 0.05
"""Added to distances, or the nearest of two close ones alone would speak."""
Shape = tuple[int, int]
"""N, K."""
Ratios = tuple[float, float]
"""In decode, and over all."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What is known of a card's unmeasured shapes.

    Attributes:
        ratios: of the measured ones.
        over: largest over-estimate of each ratio, as a factor of at least 1.
        reach: the farthest a shape may lie from the nearest measured one.
    """

    ratios: Mapping[Shape, Ratios]
    over: Ratios
    reach: float

    def least(self, N: int, K: int) -> Ratios | None:
        """Return the least ratios that a shape is to be expected at.

        Args:
            N: output features.
            K: input features.

        Returns:
            None where the shape lies outside the range of those measured, or too far from each.
        """
        told = _told(self.ratios, (N, K))
        if told is None or told[0] > self.reach or not self._within(N, K):
            return None
        decode, overall = told[1]
        return decode / self.over[0], overall / self.over[1]

    def _within(self, N: int, K: int) -> bool:
        ranges = zip((N, K), zip(*self.ratios, strict=True), strict=True)
        return all(min(known) <= value <= max(known) for value, known in ranges)


def bound(ratios: Mapping[Shape, Ratios]) -> Bound | None:
    """Find how far the neighbours' word may be off, leaving each shape out in turn.

    Args:
        ratios: of a card's measured shapes, in one format.

    Returns:
        None where there are too few.
    """
    if len(ratios) < LEAST_SHAPES:
        return None
    over, reach = [1.0, 1.0], 0.0
    for distance, told, true in _left_out(ratios):
        over = [max(worst, t / r) for worst, t, r in zip(over, told, true, strict=True)]
        reach = max(reach, distance)
    return Bound(ratios, (over[0], over[1]), reach)


def _left_out(ratios: Mapping[Shape, Ratios]) -> Iterator[tuple[float, Ratios, Ratios]]:
    """Yield each shape's distance to the others, what they say of it, and its own ratios."""
    for shape, true in ratios.items():
        told = _told({other: ratios[other] for other in ratios if other != shape}, shape)
        if told is not None:
            yield *told, true


def _told(ratios: Mapping[Shape, Ratios], shape: Shape) -> tuple[float, Ratios] | None:
    """Return the distance to the nearest shape, and the neighbours' weighted geometric means."""
    near = sorted((_distance(shape, other), other) for other in ratios)[:NEIGHBOURS]
    if not near:
        return None
    weights = [1 / (_SMALLEST + distance) for distance, _ in near]

    def mean(index: int) -> float:
        logs = (math.log(ratios[other][index]) for _, other in near)
        total = math.fsum(w * value for w, value in zip(weights, logs, strict=True))
        return math.exp(total / math.fsum(weights))

    return near[0][0], (mean(0), mean(1))


def _distance(one: Shape, other: Shape) -> float:
    return math.hypot(*(math.log(a / b) for a, b in zip(one, other, strict=True)))
