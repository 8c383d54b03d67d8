"""Bounds how many requests of one API key are under way in this gateway at a time.

Invariant: what :meth:`KeyPlaces.take` counted in, :meth:`KeyPlaces.give_back` counts out, once.
"""

from __future__ import annotations

from taut_service.admit.auth import Caller
from taut_service.errors import OverloadedError

RETRY_AFTER_S = 1.0


class KeyPlaces:
    """Counts by name, so that a reload of the keys changes nothing. Belongs to one event loop."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def take(self, caller: Caller) -> bool:
        """Count a request in.

        Args:
            caller: who sent it.

        Returns:
            Whether it was counted; False for a key without a bound.

        Raises:
            OverloadedError: the key has as many under way as it may have.
        """
        most = caller.max_inflight
        if most is None:
            return False
        taken = self._taken.get(caller.name, 0)
        if taken >= most:
            raise OverloadedError(
                f"this API key has {taken} requests under way and may have {most} (max_inflight):"
                " wait until one has ended",
                code="key_inflight_limit",
                retry_after_s=RETRY_AFTER_S,
            )
        self._taken[caller.name] = taken + 1
        return True

    def give_back(self, name: str) -> None:
        """Count it out."""
        left = self._taken[name] - 1
        if left:
            self._taken[name] = left
        else:
            del self._taken[name]
