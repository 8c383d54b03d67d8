"""How the clients of one variant fare: errors, and the pace of their newest streams.

A median comes with an interval of order statistics, which asks nothing of the times' distribution
(Conover, Practical Nonparametric Statistics, 3rd ed. 1999, §3.2): below the k-th of n times lies
the median with the probability that a coin shows heads fewer than k times in n throws. Streams are
taken as independent; those of one moment share its load, so many streams of a short step say less
than they seem to. Each look has its own interval: the error rate is that of one look.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from functools import lru_cache
from math import comb, inf
from statistics import median
from typing import NamedTuple

from taut_service.guard.tally import RESOLUTION

ERROR = "error"
"""Measure: 1 for a request that ended in a 5xx."""
NEWEST = 256
_FAILED, _FINE = f"text|{ERROR}|{RESOLUTION}", f"text|{ERROR}|0"


_ONE_SIDED = 0.025
"""Chance that a median lies above its interval; likewise below. Of a ratio of two: twice that."""


class Median(NamedTuple):
    """Seconds; the ends are 0 and infinite where there are too few streams to say."""

    low_s: float
    estimate_s: float
    high_s: float


class Medians(NamedTuple):
    """Of streams, and how many they are."""

    first_token: Median
    per_token: Median
    streams: int


def median_of(times_s: Sequence[float]) -> Median:
    """Return the median with its interval.

    Args:
        times_s: at least one.
    """
    ordered, rank = sorted(times_s), _rank(len(times_s))
    if rank == 0:
        return Median(0.0, median(ordered), inf)
    return Median(ordered[rank - 1], median(ordered), ordered[-rank])


@lru_cache(maxsize=512)
def _rank(count: int) -> int:
    """Return k so that the k-th least and largest of so many values are the ends; 0 for none."""
    below, rank = 1, 0
    while below <= _ONE_SIDED * 2**count:
        rank += 1
        below += comb(count, rank)
    return rank


class Pace:
    """Listens to a variant's metrics (:class:`taut_service.watch.metrics.Served`)."""

    def __init__(self) -> None:
        self._errors: Counter[str] = Counter()
        self._streams: deque[tuple[float, float]] = deque(maxlen=NEWEST)

    def finished(self, status: int) -> None:
        """Count an answered request; what the client did wrong says nothing about the variant."""
        if status < 400 or status >= 500:
            self._errors[_FAILED if status >= 500 else _FINE] += 1

    def streamed(self, first_token_s: float, per_token_s: float) -> None:
        """Take note of the pace of a stream."""
        self._streams.append((first_token_s, per_token_s))

    def take_errors(self) -> Counter[str]:
        """Return counts for the evidence, and begin at none."""
        taken, self._errors = self._errors, Counter()
        return taken

    def medians(self) -> Medians:
        """Return the medians of the newest streams; 0 without any."""
        if not self._streams:
            return Medians(Median(0.0, 0.0, inf), Median(0.0, 0.0, inf), 0)
        first, rest = zip(*self._streams, strict=True)
        return Medians(median_of(first), median_of(rest), len(self._streams))

    def forget_streams(self) -> None:
        """Begin anew: another step has another load."""
        self._streams.clear()
