"""How many bytes of request bodies are held at a time, over all requests.

Bodies up to :data:`FREE_BYTES` are not counted: admission bounds their number, and whoever fills
the budget with large ones must not keep the small ones out.
"""

from __future__ import annotations

from taut_service.errors import OverloadedError

FREE_BYTES = 64 * 1024
RETRY_AFTER_S = 2.0


class ByteBudget:
    """Counts bytes in and out of one event loop. Not for several threads."""

    def __init__(self) -> None:
        self.held = 0

    def hold(self) -> HeldBytes:
        """Return a share of it, empty."""
        return HeldBytes(self)


class HeldBytes:
    """What one request holds, until :meth:`release`.

    Args:
        budget: a share of which it is.
    """

    __slots__ = ("_budget", "_bytes")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._bytes = 0

    def check_room(self, expected: int, limit: int) -> None:
        """Insist that a body could be held; nothing is taken.

        Args:
            expected: its bytes.
            limit: of all requests together.

        Raises:
            OverloadedError: it could not.
        """
        if expected > FREE_BYTES and self._budget.held + expected > limit:
            raise _full(limit)

    def add(self, count: int, limit: int) -> None:
        """Take a piece.

        Args:
            count: its bytes.
            limit: of all requests together.

        Raises:
            OverloadedError: there is no room for it.
        """
        self._bytes += count
        self._budget.held += count
        if self._bytes > FREE_BYTES and self._budget.held > limit:
            raise _full(limit)

    def release(self) -> None:
        """Give everything back; again does nothing."""
        self._budget.held -= self._bytes
        self._bytes = 0


def _full(limit: int) -> OverloadedError:
    return OverloadedError(
        f"the gateway holds as many bytes of request bodies as it may ({limit}); try again later",
        code="too_many_bytes",
        retry_after_s=RETRY_AFTER_S,
    )
