"""Buckets in this process's memory: for one gateway, or for limits that are per gateway."""

from __future__ import annotations

import time
from collections.abc import Callable

from taut_service.admit.limits.bucket import MINUTE_S, SLACK, RateLimit, Standing, refilled, settled

SWEEP_AT = 1024
"""Number of buckets from which on the full ones are forgotten now and then."""


class _Buckets:
    __slots__ = ("at", "requests", "tokens")

    def __init__(self, requests: float, tokens: float, at: float) -> None:
        self.requests = requests
        self.tokens = tokens
        self.at = at


class MemoryLimitStore:
    """One pair of buckets a caller. Never waits; belongs to one event loop.

    Args:
        clock: seconds, monotonic; given by tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of: dict[str, _Buckets] = {}
        self._sweep_at = SWEEP_AT

    def __len__(self) -> int:
        return len(self._of)

    @property
    def up(self) -> bool:
        """Always."""
        return True

    @property
    def losses(self) -> int:
        """None."""
        return 0

    async def open(self) -> None:
        """Nothing to make ready."""

    async def take(self, name: str, limit: RateLimit, tokens: int) -> Standing:
        """Take from a caller's buckets, as :class:`.bucket.LimitStore` says."""
        return self.take_now(name, limit, tokens)

    def take_now(self, name: str, limit: RateLimit, tokens: int) -> Standing:
        """Do that without a coroutine: nothing is waited for."""
        buckets = self._filled(name, limit)
        enough_requests = limit.requests_per_minute is None or buckets.requests >= 1 - SLACK
        enough_tokens = limit.tokens_per_minute is None or buckets.tokens >= tokens - SLACK
        granted = enough_requests and enough_tokens
        if granted:
            buckets.requests -= 1
            buckets.tokens -= tokens
        return Standing(granted, buckets.requests, buckets.tokens)

    def settle(self, name: str, limit: RateLimit, requests: int, tokens: int) -> None:
        """Correct a caller's buckets; see :class:`~taut_service.admit.limits.bucket.LimitStore`."""
        buckets = self._filled(name, limit)
        buckets.requests = settled(buckets.requests, limit.requests_per_minute or 0, requests)
        buckets.tokens = settled(buckets.tokens, limit.tokens_per_minute or 0, tokens)

    async def close(self) -> None:
        """Nothing is under way."""

    def _filled(self, name: str, limit: RateLimit) -> _Buckets:
        now = self._clock()
        size = (float(limit.requests_per_minute or 0), float(limit.tokens_per_minute or 0))
        buckets = self._of.get(name)
        if buckets is None:
            self._sweep(now)
            buckets = self._of[name] = _Buckets(*size, now)
            return buckets
        idle_s = now - buckets.at
        buckets.requests = refilled(buckets.requests, size[0], idle_s)
        buckets.tokens = refilled(buckets.tokens, size[1], idle_s)
        buckets.at = now
        return buckets

    def _sweep(self, now: float) -> None:
        """Forget callers that used nothing for two minutes: whatever they owed, they are full."""
        if len(self._of) < self._sweep_at:
            return
        self._of = {
            name: buckets for name, buckets in self._of.items() if now - buckets.at < 2 * MINUTE_S
        }
        self._sweep_at = max(SWEEP_AT, 2 * len(self._of))
