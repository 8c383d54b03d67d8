"""How agreement went over time: a bounded series of tallies, made into intervals when looked at.

An interval costs milliseconds and a copy of a tally microseconds. So the event loop copies, and
whoever looks computes, once a point, in a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from taut_service.guard.betting import interval
from taut_service.guard.tally import Tally

MOST_POINTS = 120
"""Beyond these every other one is forgotten, and new ones come half as often."""
SPACING_S = 2.0


class Agreed(NamedTuple):
    """Share of places where both choose alike: Unix time, mean, and where the true one lies."""

    at: float
    mean: float
    low: float
    high: float


@dataclass
class _Point:
    at: float
    tally: Tally
    agreed: Agreed | None = None


class Course:
    """One variant's; since the process began, or its evidence did.

    Args:
        now: seconds, never going back.
        clock: Unix time.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._now, self._clock = now, clock
        self._points: list[_Point] = []
        self._spacing_s = SPACING_S
        self._due = -float("inf")

    def note(self, disagreement: Tally) -> None:
        """Take down where a tally stands now, if it is time for that.

        Args:
            disagreement: of the variant with its baseline; smaller than before if all begins anew.
        """
        if self._points and disagreement.size < self._points[-1].tally.size:
            self._points, self._spacing_s, self._due = [], SPACING_S, -float("inf")
        now = self._now()
        if now < self._due or not disagreement.size:
            return
        self._points.append(_Point(self._clock(), Tally(disagreement.counts)))
        if len(self._points) > MOST_POINTS:
            del self._points[-2::-2]
            self._spacing_s *= 2
        self._due = now + self._spacing_s

    def agreed(self, alpha: float) -> Callable[[], list[Agreed]]:
        """Copy the series; what is returned makes intervals of it, in any thread.

        Args:
            alpha: the probability that an interval of the series ever misses.
        """
        points = list(self._points)
        return lambda: [_agreed(point, alpha) for point in points]


def _agreed(point: _Point, alpha: float) -> Agreed:
    if point.agreed is None:
        low, high = interval(point.tally, alpha)
        mean = point.tally.mean
        ends = max(0.0, 1.0 - high), min(1.0, 1.0 - low)
        point.agreed = Agreed(point.at, 1.0 - mean, *ends)
    return point.agreed
