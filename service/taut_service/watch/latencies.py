"""The newest latencies of a variant, for the operator's page; Prometheus has them over time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pydantic import BaseModel

NEWEST = 256
"""Requests and streams that are looked back on."""


class Spread(BaseModel):
    """Seconds: the median and what one in twenty exceeds."""

    p50: float
    p95: float


class LatencyReport(BaseModel):
    """Of the newest answers; None where there was none, or none was a stream."""

    answers: int
    whole: Spread | None
    first_token: Spread | None
    per_token: Spread | None


class Latencies:
    """Kept by count and not by time: what it shows of a variant without traffic is old."""

    __slots__ = ("_first_token", "_per_token", "_whole")

    def __init__(self) -> None:
        self._whole: deque[float] = deque(maxlen=NEWEST)
        self._first_token: deque[float] = deque(maxlen=NEWEST)
        self._per_token: deque[float] = deque(maxlen=NEWEST)

    def answered(self, seconds: float) -> None:
        """Take note of a request that was answered without an error."""
        self._whole.append(seconds)

    def streamed(self, first_token_s: float, per_token_s: float | None) -> None:
        """Take note of the pace of a stream; a single event has no time between tokens."""
        self._first_token.append(first_token_s)
        if per_token_s is not None:
            self._per_token.append(per_token_s)

    def report(self) -> LatencyReport:
        """Summarise them."""
        return LatencyReport(
            answers=len(self._whole),
            whole=_spread(self._whole),
            first_token=_spread(self._first_token),
            per_token=_spread(self._per_token),
        )


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return Spread(p50=ordered[round(0.5 * last)], p95=ordered[round(0.95 * last)])
