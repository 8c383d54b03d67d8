"""How the clients of one variant fare: errors, and the pace of their newest streams."""

from __future__ import annotations

from collections import Counter, deque
from statistics import median
from typing import NamedTuple

from taut_service.guard.tally import RESOLUTION

ERROR = "error"
"""Measure: 1 for a request that ended in a 5xx."""
NEWEST = 256
_FAILED, _FINE = f"text|{ERROR}|{RESOLUTION}", f"text|{ERROR}|0"


class Medians(NamedTuple):
    """Seconds, and how many streams they are of."""

    first_token_s: float
    per_token_s: float
    streams: int


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
            return Medians(0.0, 0.0, 0)
        first, rest = zip(*self._streams, strict=True)
        return Medians(median(first), median(rest), len(self._streams))

    def forget_streams(self) -> None:
        """Begin anew: another step has another load."""
        self._streams.clear()
