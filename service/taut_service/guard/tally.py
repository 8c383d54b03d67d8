"""Bounded observations as counts on a grid: all that the tests of :mod:`.betting` need of them.

Fixed bets make the evidence a function of how often each value was seen, not of the order. So the
tallies of several gateways, and of a process before and after its restart, are simply added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

RESOLUTION = 1000
"""Steps of the grid within a unit: a value is off by at most 1/2000."""


class Tally:
    """How often each value in [-1, 1] was seen, rounded to the grid.

    Args:
        counts: grid step → times seen.
    """

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts: dict[int, int] = dict(counts or {})
        self.size = sum(self.counts.values())

    @property
    def mean(self) -> float:
        """Mean of what was seen, 0 of nothing."""
        if not self.size:
            return 0.0
        return sum(step * n for step, n in self.counts.items()) / (RESOLUTION * self.size)

    def add(self, value: float) -> int:
        """Count one value.

        Args:
            value: clipped to [-1, 1].

        Returns:
            Its step on the grid.

        Raises:
            ValueError: it is not a number.
        """
        step = step_of(value)
        self.merge({step: 1})
        return step

    def merge(self, counts: Mapping[int, int]) -> None:
        """Add the counts of another."""
        for step, times in counts.items():
            self.counts[step] = self.counts.get(step, 0) + times
            self.size += times


def step_of(value: float) -> int:
    """Return the grid step nearest to a value, which is clipped to [-1, 1].

    Raises:
        ValueError: it is not a number.
    """
    if math.isnan(value):
        raise ValueError("an observation is not a number")
    return round(max(-1.0, min(1.0, value)) * RESOLUTION)
