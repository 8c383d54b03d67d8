"""A budget for sending requests again: a share of the traffic, so that retries cannot feed a storm.

Invariant: ``0 <= balance <= burst``. Source: the token bucket of Finagle's ``RetryBudget``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from taut_service.config.settings import Retries


class RetryBudget:
    """Of one model.

    Args:
        limits: what fills it and how much it holds.
        clock: seconds, monotonic; given by tests.
    """

    __slots__ = ("_balance", "_clock", "_filled_at", "limits")

    def __init__(self, limits: Retries, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._filled_at = clock()
        self._balance = float(limits.budget_burst)

    @property
    def balance(self) -> float:
        """Retries that could be sent now."""
        self._fill()
        return self._balance

    def earn(self) -> None:
        """Count a new request."""
        # The ceiling is applied when the budget is looked at.
        self._balance += self.limits.budget_ratio

    def spend(self) -> bool:
        """Take one retry out; return whether there was one."""
        self._fill()
        if self._balance < 1:
            return False
        self._balance -= 1
        return True

    def _fill(self) -> None:
        now = self._clock()
        earned = (now - self._filled_at) * self.limits.budget_min_per_s
        self._balance = min(float(self.limits.budget_burst), self._balance + earned)
        self._filled_at = now
