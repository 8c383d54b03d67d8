"""Circuit breaker of one worker: after many failures it is left alone, then tried with one request.

Invariant: at most one probe is under way while the breaker is half-open; a success or failure of
    a request that began before the breaker opened does not move it.
A failure is a lost connection, an answer that is not HTTP, silence, or a 5xx other than 503: that
    one says "too busy", the business of :meth:`taut_service.worker.worker.Worker.back_off`. Besides
    a number of failures it takes a share of all outcomes, so that one bad request in a thousand
    does not close a worker that serves ten thousand. The breaker advises, it does not forbid: a
    request that no other worker can take may still be sent (``last_resort``), or a client whose
    requests crash one worker after another could switch off all of them for everybody.
Source: M. Nygard, Release It!, 2nd ed., chapter 5, "Circuit Breaker".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from taut_service.config.settings import Breaker

BreakerState = Literal["closed", "open", "half_open"]


class CircuitBreaker:
    """Belongs to one worker and one event loop.

    Args:
        limits: when to open and for how long.
        clock: seconds, monotonic; given by tests.
    """

    __slots__ = (
        "_clock",
        "_failures",
        "_open_until",
        "_probing",
        "_successes",
        "_window_ends",
        "closed",
        "limits",
        "opened",
    )

    def __init__(self, limits: Breaker, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self.opened = 0
        self.reset()

    def reset(self) -> None:
        """Close and forget; for a worker that has just proved itself."""
        self.closed = True
        self._failures = 0
        self._successes = 0
        self._window_ends = 0.0
        self._open_until = 0.0
        self._probing = False

    @property
    def state(self) -> BreakerState:
        """What it is now; ``half_open`` from the end of the open time to the probe's outcome."""
        if self.closed:
            return "closed"
        return "open" if self._clock() < self._open_until else "half_open"

    def lets_through(self) -> bool:
        """Whether a request may be sent now."""
        return self.closed or (not self._probing and self._clock() >= self._open_until)

    def begin(self) -> bool:
        """Count a request in.

        Returns:
            Whether it is the probe of a half-open breaker; to be given to its outcome.
        """
        if self.closed or not self.lets_through():
            return False
        self._probing = True
        return True

    def succeeded(self, probe: bool) -> None:
        """Count an answer that came whole."""
        if self.closed:
            self._successes += 1
        elif probe:
            self.reset()

    def failed(self, probe: bool) -> None:
        """Count a failure; open if there were too many, or again if it was the probe."""
        now = self._clock()
        if not self.closed:
            if probe:
                self._open(now)
            return
        if now >= self._window_ends:
            # A window begins with a failure: what went well before it says nothing about now.
            self._window_ends = now + self.limits.window_s
            self._failures = self._successes = 0
        self._failures += 1
        outcomes = self._failures + self._successes
        if self._failures >= self.limits.failures and (
            self._failures >= self.limits.failure_ratio * outcomes
        ):
            self._open(now)

    def abandoned(self, probe: bool) -> None:
        """Count a request that ended without telling anything: the client left."""
        if probe:
            self._probing = False

    def _open(self, now: float) -> None:
        self.closed = False
        self._probing = False
        self._failures = self._successes = 0
        self._window_ends = 0.0
        self._open_until = now + self.limits.open_s
        self.opened += 1
