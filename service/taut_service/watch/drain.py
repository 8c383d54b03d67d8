"""The end of the gateway's life: refuse what is new, let what is running finish, cut what does not.

One object, asked by the front (may a request enter?), by readiness (what is said?), by the server
(may the process end?) and by the hook that runs before a pod is stopped (is it empty yet?).

Before a signal, an operator may drain and reopen. Such a drain can begin with a time in which
readiness already says no while requests are still served: load balancers go on sending for as
long as they have not heard.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from taut_service.errors import UnavailableError
from taut_service.http.request_watch import SHUTDOWN_RETRY_AFTER_S, RequestWatch

CUT_GRACE_S = 2.0
"""Time for cut requests to write their last event."""


class Drain:
    """Knows every request under way. Belongs to one event loop.

    Args:
        clock: seconds, monotonic; given by tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.draining = False
        self._clock = clock
        self._refuse_from = 0.0
        self._ending = False
        self._live: set[RequestWatch] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._hurry = asyncio.Event()

    @property
    def live(self) -> int:
        """Requests under way."""
        return len(self._live)

    @property
    def ending(self) -> bool:
        """Whether the process is to end when the drain is over."""
        return self._ending

    def enter(self, watch: RequestWatch) -> None:
        """Count a request in, whether or not it will be refused."""
        if not self._live:
            self._empty.clear()
        self._live.add(watch)

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
        if self.draining and self._clock() >= self._refuse_from:
            raise UnavailableError(
                "the gateway is shutting down",
                code="draining",
                retry_after_s=SHUTDOWN_RETRY_AFTER_S,
            )

    def begin(self, accept_s: float = 0.0) -> None:
        """Say "not ready" from now on, and refuse new requests.

        Args:
            accept_s: seconds from now in which new requests are still served. A second call can
                only shorten it.
        """
        refuse_from = self._clock() + accept_s
        self._refuse_from = min(self._refuse_from, refuse_from) if self.draining else refuse_from
        self.draining = True

    def reopen(self) -> bool:
        """Take new requests again.

        Returns:
            False if the process is ending already: nothing has changed then.
        """
        if self._ending:
            return False
        self.draining = False
        return True

    def hurry(self) -> None:
        """Have :meth:`finish` wait no longer for requests to end by themselves."""
        self._hurry.set()

    async def finish(self, timeout_s: float) -> bool:
        """Wait until no request is under way, at most ``timeout_s``, then end those that remain.

        Their clients get an error, and ``CUT_GRACE_S`` to read it.

        Args:
            timeout_s: seconds.

        Returns:
            Whether all of them ended by themselves.
        """
        self._ending = True
        self.begin()
        if await self._empty_or_hurried(timeout_s):
            return True
        for watch in list(self._live):
            watch.shut_down()
        await self._empty_within(CUT_GRACE_S)
        return False

    async def _empty_or_hurried(self, timeout_s: float) -> bool:
        waits = [asyncio.ensure_future(event.wait()) for event in (self._empty, self._hurry)]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not self._live

    async def _empty_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
