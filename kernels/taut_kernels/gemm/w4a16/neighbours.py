"""Whether ours wins on a shape nobody measured: a cautious estimate from its nearest measured ones.

A card's measured shapes tell a new one's ratio (vLLM's time ÷ ours) by the three nearest in (log N,
log K), the nearer the more. That is lowered by the largest over-estimate among the 32 nearest, each
left out in turn, for narrow shapes are told worse than wide ones. It is an estimate, no bound: of
the shapes of two cards, held out, a few were slower than told (:data:`TOO_HIGH`). For shapes that
lie farther from everything measured than those did, or where few were, there is none. Only
shapes that all of vLLM's kernels take speak: where Machete refuses, ours is farther ahead than
anywhere near.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NEIGHBOURS = 3
LEAST_SHAPES = 16
"""Fewer tell nothing."""
LOWERED_BY = 32
"""Nearest shapes, the largest of whose over-estimates lowers an estimate."""
TOO_HIGH = 6, 1.25
"""Of a hundred estimates fewer than so many were above what was measured, by less than this factor:
a fifth of each shipped table held out after the other, both cards and formats apart."""
MACHETE_N = 128
"""Machete takes multiples of so many output features."""
_SMALLEST = 0.05
"""Added to distances, or the nearest of two close ones alone would speak."""
Shape = tuple[int, int]
"""N, K."""
Ratios = tuple[float, float]
"""In decode, and over all."""
_Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Estimates:
    """What a card's measured shapes tell of others.

    Attributes:
        ratios: of the measured ones.
        points: their log N and log K.
        reach: the farthest a shape may lie from the nearest measured one.
    """

    ratios: Mapping[Shape, Ratios]
    points: Mapping[Shape, _Point]
    reach: float
    _over: dict[Shape, Ratios] = field(default_factory=dict, repr=False)

    def of(self, N: int, K: int) -> Ratios | None:
        """Return a cautious estimate of a shape's ratios.

        Args:
            N: output features.
            K: input features.

        Returns:
            None where the shape lies outside the range of those measured, or too far from each.
        """
        near = _nearest(self.points, _point((N, K)), LOWERED_BY)
        if near[0][0] > self.reach or not self._within(N, K):
            return None
        decode, overall = _mean(self.ratios, near[:NEIGHBOURS])
        over = [self._over_estimate(shape) for _, shape in near]
        return decode / max(1.0, *(o[0] for o in over)), overall / max(1.0, *(o[1] for o in over))

    def _over_estimate(self, shape: Shape) -> Ratios:
        """Return what the others say of a measured shape ÷ what it has."""
        if shape not in self._over:
            others = _nearest(self.points, self.points[shape], NEIGHBOURS + 1)
            told = _mean(self.ratios, [o for o in others if o[1] != shape][:NEIGHBOURS])
            true = self.ratios[shape]
            self._over[shape] = told[0] / true[0], told[1] / true[1]
        return self._over[shape]

    def _within(self, N: int, K: int) -> bool:
        ranges = zip((N, K), zip(*self.ratios, strict=True), strict=True)
        return all(min(known) <= value <= max(known) for value, known in ranges)


def estimates(ratios: Mapping[Shape, Ratios]) -> Estimates | None:
    """Collect what tells of a card's unmeasured shapes.

    Args:
        ratios: of a card's measured shapes, in one format.

    Returns:
        None where there are too few.
    """
    known = {shape: of for shape, of in ratios.items() if shape[0] % MACHETE_N == 0}
    if len(known) < LEAST_SHAPES:
        return None
    points = {shape: _point(shape) for shape in known}
    # The nearest to a shape is the shape itself; the second is its neighbour.
    reach = max(_nearest(points, point, 2)[1][0] for point in points.values())
    return Estimates(known, points, reach)


def _point(shape: Shape) -> _Point:
    return math.log(shape[0]), math.log(shape[1])


def _nearest(
    points: Mapping[Shape, _Point], point: _Point, count: int
) -> list[tuple[float, Shape]]:
    """Return the nearest shapes with their distances, the nearest first."""
    distances = ((math.dist(point, other), shape) for shape, other in points.items())
    return heapq.nsmallest(count, distances)


def _mean(ratios: Mapping[Shape, Ratios], near: Sequence[tuple[float, Shape]]) -> Ratios:
    """Return the geometric means of shapes' ratios, the nearer the more."""
    weights = [1 / (_SMALLEST + distance) for distance, _ in near]

    def mean(index: int) -> float:
        logs = (math.log(ratios[shape][index]) for _, shape in near)
        total = math.fsum(w * value for w, value in zip(weights, logs, strict=True))
        return math.exp(total / math.fsum(weights))

    return mean(0), mean(1)
