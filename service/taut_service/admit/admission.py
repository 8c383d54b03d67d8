"""Bounded admission: how many requests run, how many wait, and who is told to come back later.

Invariant, per model: ``0 <= inflight <= max_inflight``, ``0 <= inflight_tokens <=
    max_inflight_tokens`` and ``0 <= queued <= max_queued``; a waiter leaves by admission, deadline,
    cancellation or because a caller with a better claim pushed it out, and every admitted request
    gives its place back exactly once. Nobody overtakes the head of the queue, so a large request
    is not starved by small ones. Who is head: :mod:`taut_service.admit.fair_queue`. Knows nothing
    of HTTP or of workers. A request larger than ``max_inflight_tokens`` counts as that many: it
    runs alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from taut_service.admit.fair_queue import FairQueue, Priority, Waiter
from taut_service.config.settings import AdmissionLimit, BrownOut, Settings
from taut_service.errors import OverloadedError

SMOOTHING = 0.1
"""Weight of the newest service time in the running mean."""
MAX_RETRY_AFTER_S = 60.0


class Claim:
    """What a request asks for, and on whose behalf.

    Args:
        tokens: estimate of prompt and completion together.
        key: the caller; all that have none share one line.
        weight: the caller's share in its class.
        priority: its class.
        timeout_s: longest wait the client allows, None if it set none.
    """

    __slots__ = ("key", "priority", "timeout_s", "tokens", "weight")

    def __init__(
        self,
        tokens: int = 1,
        key: str = "",
        weight: float = 1.0,
        priority: Priority = Priority.NORMAL,
        timeout_s: float | None = None,
    ) -> None:
        self.tokens = tokens
        self.key = key
        self.weight = weight
        self.priority = priority
        self.timeout_s = timeout_s


ANYBODY = Claim()
"""A request of which nothing is known."""


class AdmissionController:
    """Counts the requests of one model in and out of one event loop. Not for several threads.

    Args:
        limit: the bounds.
        brown_out: from which queue length on :attr:`under_pressure` holds; None is never.
        clock: seconds, monotonic; given by tests.
    """

    def __init__(
        self,
        limit: AdmissionLimit,
        brown_out: BrownOut | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._queue = FairQueue(limit.aging_s)
        self._mean_service_s = 0.0
        self._pressed = False
        self.inflight = 0
        self.inflight_tokens = 0
        self.apply(limit, brown_out)

    def apply(self, limit: AdmissionLimit, brown_out: BrownOut | None = None) -> None:
        """Change the bounds; what runs and waits stays. A lower bound holds as places come free."""
        self._limit = limit
        self._brown_out = brown_out
        # A bound of this size is never met: sums of estimates stay far below.
        self._max_tokens = limit.max_inflight_tokens or 1 << 62
        self._queue.aging_s = limit.aging_s
        self._admit_waiters()

    @property
    def queued(self) -> int:
        """Requests waiting now."""
        return len(self._queue)

    @property
    def under_pressure(self) -> bool:
        """Whether the queue passed the brown-out's beginning and not yet its end again."""
        brown_out = self._brown_out
        if brown_out is None:
            return False
        share = len(self._queue) / max(1, self._limit.max_queued)
        if self._pressed:
            self._pressed = share > brown_out.until_queue_fraction
        else:
            self._pressed = share >= brown_out.at_queue_fraction
        return self._pressed

    def slot(self, claim: Claim = ANYBODY) -> Slot:
        """Return ``async with`` context that holds one place while it is entered."""
        return Slot(self, claim, self._clock)

    def retry_after_s(self, tokens: int = 1) -> float:
        """Estimate when a newcomer gets a place.

        Args:
            tokens: its estimate.

        Returns:
            Seconds: what waits, in turns of all places, times the mean service time.
        """
        turns = max(
            (len(self._queue) + 1) / self._limit.max_inflight,
            (self._queue.tokens + tokens) / self._max_tokens,
        )
        return min(MAX_RETRY_AFTER_S, max(1.0, turns * self._mean_service_s))

    def take(self, claim: Claim) -> int:
        """Take a place if that needs no waiting.

        Args:
            claim: what is asked for.

        Returns:
            The tokens it holds, to be given to :meth:`release`; 0 if it must wait.
        """
        tokens = self._clamped(claim)
        if self._queue or not self._fits(tokens):
            return 0
        self.inflight += 1
        self.inflight_tokens += tokens
        return tokens

    async def acquire(self, claim: Claim = ANYBODY) -> int:
        """Take a place, waiting for it if need be.

        Args:
            claim: what is asked for.

        Returns:
            The tokens it holds, to be given to :meth:`release`.

        Raises:
            OverloadedError: the queue is full of requests with a better claim, or the wait was
                longer than ``queue_timeout_s`` or the client allows; ``code`` tells which.
        """
        tokens = self.take(claim)
        if tokens:
            return tokens
        tokens = self._clamped(claim)
        loop = asyncio.get_running_loop()
        waiter = Waiter(
            claim.key, claim.weight, claim.priority, tokens, self._clock(), loop.create_future()
        )
        self._enqueue(waiter)
        await self._wait(waiter, claim.timeout_s)
        return tokens

    def release(self, service_s: float, tokens: int = 1) -> None:
        """Give a place back.

        Args:
            service_s: how long it was held, for the estimate of ``Retry-After``.
            tokens: what :meth:`acquire` returned.
        """
        if self._mean_service_s == 0.0:
            self._mean_service_s = service_s
        else:
            self._mean_service_s += SMOOTHING * (service_s - self._mean_service_s)
        self._free(tokens)

    def _clamped(self, claim: Claim) -> int:
        tokens = claim.tokens
        return 1 if tokens < 1 else tokens if tokens < self._max_tokens else self._max_tokens

    def _fits(self, tokens: int) -> bool:
        # Whoever runs alone fits: a waiter may be larger than a bound that was lowered meanwhile.
        return self.inflight < self._limit.max_inflight and (
            self.inflight_tokens + tokens <= self._max_tokens or self.inflight == 0
        )

    def _enqueue(self, waiter: Waiter) -> None:
        if len(self._queue) >= self._limit.max_queued:
            victim = self._queue.yields_to(waiter) if self._queue else None
            if victim is None:
                raise self._overloaded("the gateway's queue is full", "queue_full", waiter.tokens)
            self._queue.remove(victim)
            if not victim.place.done():
                text = "the gateway's queue is full and others have a better claim"
                victim.place.set_exception(self._overloaded(text, "queue_full", victim.tokens))
        self._queue.push(waiter)
        # A newcomer of a higher class may fit although the former head did not.
        self._admit_waiters()

    async def _wait(self, waiter: Waiter, timeout_s: float | None) -> None:
        limit_s = self._limit.queue_timeout_s
        if timeout_s is not None:
            limit_s = min(limit_s, timeout_s)
        try:
            async with asyncio.timeout(limit_s):
                await waiter.place
        except TimeoutError as error:
            self._leave(waiter)
            text = f"no place came free within {limit_s:g} s"
            raise self._overloaded(text, "queue_timeout", waiter.tokens) from error
        except asyncio.CancelledError:
            self._leave(waiter)
            raise

    def _leave(self, waiter: Waiter) -> None:
        place = waiter.place
        if waiter.queued:
            self._queue.remove(waiter)
            # It may have been a head that did not fit, with others behind it that do.
            self._admit_waiters()
        elif not place.cancelled() and place.exception() is None:
            # A place was handed over in the same turn of the loop that ended the wait.
            self._free(waiter.tokens)

    def _free(self, tokens: int) -> None:
        self.inflight -= 1
        self.inflight_tokens -= tokens
        if self._queue:
            self._admit_waiters()

    def _admit_waiters(self) -> None:
        now = self._clock()
        while self._queue and self.inflight < self._limit.max_inflight:
            waiter = self._queue.next(now)
            # One cancelled in this turn of the loop takes itself out when its task runs, and calls
            # this again.
            if waiter.place.done() or not self._fits(waiter.tokens):
                return
            self._queue.serve(waiter)
            self.inflight += 1
            self.inflight_tokens += waiter.tokens
            waiter.place.set_result(None)

    def _overloaded(self, text: str, code: str, tokens: int) -> OverloadedError:
        return OverloadedError(
            f"{text}; try again later", code=code, retry_after_s=self.retry_after_s(tokens)
        )


class Slot:
    """One place, held in an ``async with`` block whatever ends it.

    A request does what the block does by itself, since that is two coroutines more: :meth:`take`
    or :meth:`wait`, and :meth:`release` in a ``finally``.
    """

    __slots__ = ("_claim", "_clock", "_controller", "_since", "_tokens")

    def __init__(
        self, controller: AdmissionController, claim: Claim, clock: Callable[[], float]
    ) -> None:
        self._controller = controller
        self._claim = claim
        self._clock = clock
        self._since = 0.0
        self._tokens = 0

    def take(self) -> bool:
        """Take the place if that needs no waiting; return whether it is taken."""
        self._tokens = self._controller.take(self._claim)
        self._since = self._clock()
        return self._tokens > 0

    async def wait(self) -> None:
        """Take the place; raises what :meth:`AdmissionController.acquire` does."""
        self._tokens = await self._controller.acquire(self._claim)
        self._since = self._clock()

    def release(self) -> None:
        """Give the place back."""
        self._controller.release(self._clock() - self._since, self._tokens)

    async def __aenter__(self) -> None:
        if not self.take():
            await self.wait()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Admission:
    """The controllers of all models. Lives as long as the process: a reload changes the bounds.

    Args:
        settings: the configuration.
    """

    def __init__(self, settings: Settings) -> None:
        self._of: dict[str, AdmissionController] = {}
        self._configured: frozenset[str] = frozenset()
        self.apply(settings)

    def apply(self, settings: Settings) -> None:
        """Take over a new configuration; a model that stays keeps what runs and waits.

        A model that goes is known until the change after next, and for as long as it is busy: a
        request may be on its way to it.
        """
        retired = self._of.keys() - self._configured
        for name in retired:
            if not (self._of[name].inflight or self._of[name].queued):
                del self._of[name]
        self._configured = frozenset(model.name for model in settings.models)
        for model in settings.models:
            limit = model.admission or settings.admission
            controller = self._of.get(model.name)
            if controller is None:
                self._of[model.name] = AdmissionController(limit, model.brown_out)
            else:
                controller.apply(limit, model.brown_out)

    def of(self, model: str) -> AdmissionController:
        """Return the controller of a configured model."""
        return self._of[model]

    @property
    def inflight(self) -> int:
        """Requests admitted and not ended, of all models."""
        return sum(controller.inflight for controller in self._of.values())

    @property
    def queued(self) -> int:
        """Requests waiting, of all models."""
        return sum(controller.queued for controller in self._of.values())
