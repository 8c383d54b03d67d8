"""The arithmetic of a caller's two token buckets, one for requests and one for tokens.

A bucket holds at most a minute's worth and fills evenly, so after a pause a caller may use a whole
minute's worth at once, and in any minute at most twice that. A request takes one request and its
estimated tokens, or nothing; settling it gives back or charges the difference to what it really
used. A charge may leave the token bucket below zero, by one minute's worth at most.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

MINUTE_S: Final = 60.0
SLACK: Final = 1e-6
"""What may be missing from a bucket: rounding must not refuse who waited as long as it was told."""


class RateLimit(NamedTuple):
    """What a caller may use in a minute; None is no limit."""

    requests_per_minute: int | None
    tokens_per_minute: int | None


class Standing(NamedTuple):
    """Where a caller stands after a take.

    Args:
        granted: whether the request may pass.
        requests: what is left in that bucket; meaningless without that limit.
        tokens: what is left in that bucket; may be below 0.
    """

    granted: bool
    requests: float
    tokens: float


class LimitStore(Protocol):
    """Keeps the buckets of all callers."""

    @property
    def up(self) -> bool:
        """Whether it can be asked now."""
        ...

    @property
    def losses(self) -> int:
        """How often it was lost."""
        ...

    async def open(self) -> None:
        """Make it ready; a failure is the store's own business."""
        ...

    async def take(self, name: str, limit: RateLimit, tokens: int) -> Standing | None:
        """Take one request and ``tokens`` from a caller's buckets if both hold enough.

        Args:
            name: the caller.
            limit: its limit now.
            tokens: at most a minute's worth.

        Returns:
            Where it stands, or None if nobody knows and the request may pass.

        Raises:
            UnavailableError: nobody knows and the request may not pass.
        """
        ...

    def settle(self, name: str, limit: RateLimit, requests: int, tokens: int) -> None:
        """Give back to a caller's buckets, or charge them what is negative.

        Args:
            name: the caller.
            limit: its limit when it took.
            requests: 0 or 1.
            tokens: taken less used.
        """
        ...

    async def close(self) -> None:
        """Finish what is under way."""
        ...


def refilled(level: float, per_minute: float, idle_s: float) -> float:
    """Return the level of a bucket after it was left alone.

    Args:
        level: what it held.
        per_minute: its size, and what flows in within a minute.
        idle_s: seconds since.
    """
    return min(per_minute, level + per_minute * idle_s / MINUTE_S)


def settled(level: float, per_minute: float, back: float) -> float:
    """Return the level of a bucket after a settlement.

    Args:
        level: what it held.
        per_minute: its size.
        back: given back if positive, charged if negative.
    """
    return max(-per_minute, min(per_minute, level + back))


def wait_s(level: float, per_minute: float, needed: float) -> float:
    """Return the seconds until a bucket holds ``needed``; 0 if it does."""
    return max(0.0, (needed - level) * MINUTE_S / per_minute)
