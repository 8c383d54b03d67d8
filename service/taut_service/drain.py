"""The end of the gateway's life: refuse what is new, let what is running finish, cut what does not.

One object, asked by the front (may a request enter?), by readiness (what is said?) and by the
server (may the process end?).
"""

from __future__ import annotations

import asyncio

from taut_service.errors import UnavailableError
from taut_service.watch import SHUTDOWN_RETRY_AFTER_S, RequestWatch

CUT_GRACE_S = 2.0
"""Time for cut requests to write their last event."""


class Drain:
    """Knows every request under way. Belongs to one event loop."""

    def __init__(self) -> None:
        self.draining = False
        self._live: set[RequestWatch] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def live(self) -> int:
        """Requests under way."""
        return len(self._live)

    def enter(self, watch: RequestWatch) -> None:
        """Count a request in, whether or not it will be refused."""
        self._live.add(watch)
        self._empty.clear()

    def leave(self, watch: RequestWatch) -> None:
        """Count it out."""
        self._live.discard(watch)
        if not self._live:
            self._empty.set()

    def check_open(self) -> None:
        """Let a new request in or not.

        Raises:
            UnavailableError: draining has begun.
        """
        if self.draining:
            raise UnavailableError(
                "the gateway is shutting down",
                code="draining",
                retry_after_s=SHUTDOWN_RETRY_AFTER_S,
            )

    def begin(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True

    async def finish(self, timeout_s: float) -> bool:
        """Wait until no request is under way, at most ``timeout_s``, then end those that remain.

        Args:
            timeout_s: seconds.

        Returns:
            Whether all of them ended by themselves.
        """
        self.begin()
        if await self._empty_within(timeout_s):
            return True
        for watch in list(self._live):
            watch.shut_down()
        await self._empty_within(CUT_GRACE_S)
        return False

    async def _empty_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
