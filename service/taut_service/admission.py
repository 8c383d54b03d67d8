"""Bounded admission: how many requests run, how many wait, and who is told to come back later.

Invariant: ``0 <= inflight <= max_inflight`` and ``0 <= queued <= max_queued``; a waiter leaves by
    admission, deadline or cancellation, and every admitted request gives its place back exactly
    once. First come, first served. Knows nothing of HTTP, of models or of workers.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from taut_service.errors import OverloadedError
from taut_service.settings import AdmissionLimit

SMOOTHING = 0.1
"""Weight of the newest service time in the running mean."""
MAX_RETRY_AFTER_S = 60.0


class AdmissionController:
    """Counts requests in and out of one event loop. Not for use from several threads.

    Args:
        limit: the bounds.
        clock: seconds, monotonic; given by tests.
    """

    def __init__(
        self, limit: AdmissionLimit, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self._clock = clock
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._mean_service_s = 0.0
        self.inflight = 0

    @property
    def queued(self) -> int:
        """Requests waiting now."""
        return len(self._waiters)

    def slot(self) -> Slot:
        """Return ``async with`` context that holds one place while it is entered."""
        return Slot(self, self._clock)

    def retry_after_s(self) -> float:
        """Estimate when a newcomer gets a place, from the queue and the mean service time."""
        turns = (self.queued + 1) / self._limit.max_inflight
        return min(MAX_RETRY_AFTER_S, max(1.0, turns * self._mean_service_s))

    async def acquire(self) -> None:
        """Take a place, waiting for it if need be.

        Raises:
            OverloadedError: the queue is full, or the wait was longer than ``queue_timeout_s``;
                ``code`` tells which.
        """
        if self.inflight < self._limit.max_inflight and not self._waiters:
            self.inflight += 1
            return
        if len(self._waiters) >= self._limit.max_queued:
            raise self._overloaded("the gateway's queue is full", "queue_full")
        await self._wait_in_line()

    async def _wait_in_line(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(self._limit.queue_timeout_s):
                await waiter
        except TimeoutError as error:
            self._leave(waiter)
            text = f"no place came free within {self._limit.queue_timeout_s:g} s"
            raise self._overloaded(text, "queue_timeout") from error
        except asyncio.CancelledError:
            self._leave(waiter)
            raise

    def _leave(self, waiter: asyncio.Future[None]) -> None:
        # A place may have been handed over in the same turn of the loop that ended the wait.
        if waiter.done() and not waiter.cancelled():
            self._hand_over()
        elif waiter in self._waiters:
            self._waiters.remove(waiter)

    def release(self, service_s: float) -> None:
        """Give a place back.

        Args:
            service_s: how long it was held, for the estimate of ``Retry-After``.
        """
        if self._mean_service_s == 0.0:
            self._mean_service_s = service_s
        else:
            self._mean_service_s += SMOOTHING * (service_s - self._mean_service_s)
        self._hand_over()

    def _hand_over(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                # The place changes hands without being counted out and in, so no newcomer can
                # slip between.
                waiter.set_result(None)
                return
        self.inflight -= 1

    def _overloaded(self, text: str, code: str) -> OverloadedError:
        return OverloadedError(
            f"{text}; try again later", code=code, retry_after_s=self.retry_after_s()
        )


class Slot:
    """One place, held between ``__aenter__`` and ``__aexit__`` whatever ends the block."""

    def __init__(self, controller: AdmissionController, clock: Callable[[], float]) -> None:
        self._controller = controller
        self._clock = clock
        self._since = 0.0

    async def __aenter__(self) -> None:
        await self._controller.acquire()
        self._since = self._clock()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._controller.release(self._clock() - self._since)
