"""Who is next: strict classes, weighted fair queueing between callers inside a class, ageing.

Inside a class every caller has its own first-come-first-served line, and the line whose head would
finish first in virtual time goes next: self-clocked fair queueing (Golestani, INFOCOM 1994, §III),
with tokens for bits. A caller pays ``tokens / weight`` of virtual time when one of its requests is
served, never when one merely waits, so a request that gives up costs its caller nothing.

Ageing: a waiter that has stood in a class for ``aging_s`` moves to the class above, to the end of
its caller's line there. So every waiter reaches the first class after a bounded time, and fair
queueing serves everybody there.

When the queue is full, a newcomer may push out the newest request of whoever has most waiting: see
:meth:`FairQueue.yields_to`. A flood by one caller so fills its own share, not the queue.

Decides nothing about capacity: that is :mod:`taut_service.admit.admission`. Choosing costs one look
at each caller that waits.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from enum import IntEnum
from operator import attrgetter

RESERVED_FRACTION = 1 / 8
"""Share of a full queue that a class keeps against the others."""


class Priority(IntEnum):
    """Classes in the order in which they are served."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class Waiter:
    """One request that waits; ``queued`` tells whether it is in the queue.

    Args:
        key: the caller; callers that nobody tells apart share one.
        weight: the caller's share, above 0.
        priority: the class it enters.
        tokens: what it costs, at least 1.
        now: when it came, seconds on the queue's clock.
        place: resolved with None when it is admitted, with an exception when it is pushed out.
    """

    __slots__ = ("cost", "key", "place", "priority", "queued", "since", "tokens")

    def __init__(
        self,
        key: str,
        weight: float,
        priority: Priority,
        tokens: int,
        now: float,
        place: asyncio.Future[None],
    ) -> None:
        self.key = key
        self.priority = priority
        self.tokens = tokens
        self.cost = tokens / weight
        self.since = now
        self.place = place
        self.queued = False


class _Line:
    """One caller's waiters within a class, in order of arrival.

    ``start`` and ``finish`` are the virtual times at which serving its head begins and ends,
    ``cost`` is what all of them cost.
    """

    __slots__ = ("cost", "finish", "start", "waiters")

    def __init__(self, start: float) -> None:
        self.waiters: OrderedDict[Waiter, None] = OrderedDict()
        self.start = start
        self.finish = start
        self.cost = 0.0

    @property
    def head(self) -> Waiter:
        return next(iter(self.waiters))

    def add(self, waiter: Waiter) -> None:
        if not self.waiters:
            self.finish = self.start + waiter.cost
        self.waiters[waiter] = None
        self.cost += waiter.cost

    def remove(self, waiter: Waiter) -> None:
        del self.waiters[waiter]
        self.cost -= waiter.cost
        if self.waiters:
            self.finish = self.start + self.head.cost


_FINISH = attrgetter("finish")


class _Class:
    """The lines of one priority; a caller without waiters has none, and no memory of it is kept."""

    def __init__(self) -> None:
        self.arrivals: OrderedDict[Waiter, None] = OrderedDict()
        self._lines: dict[str, _Line] = {}
        self._clock = 0.0

    def add(self, waiter: Waiter) -> None:
        line = self._lines.get(waiter.key)
        if line is None:
            line = self._lines[waiter.key] = _Line(self._clock)
        line.add(waiter)
        self.arrivals[waiter] = None

    def remove(self, waiter: Waiter) -> None:
        """Take one out, uncharged: whoever is behind it begins when it would have begun."""
        line = self._lines[waiter.key]
        line.remove(waiter)
        del self.arrivals[waiter]
        if not line.waiters:
            del self._lines[waiter.key]
        if not self.arrivals:
            self._clock = 0.0

    def next(self) -> Waiter:
        """Return the head with the earliest virtual finish; of equals, the line that is older."""
        return min(self._lines.values(), key=_FINISH).head

    def serve(self, waiter: Waiter) -> None:
        """Take out the head of a line and charge its caller."""
        line = self._lines[waiter.key]
        self._clock = line.start = line.finish
        self.remove(waiter)

    def backlog(self, key: str) -> float:
        """Return the virtual time at which all that a caller has waiting would be served."""
        line = self._lines.get(key)
        return self._clock if line is None else line.start + line.cost

    def last(self) -> Waiter:
        """Return the newest waiter of the caller with the largest backlog."""
        longest = max(self._lines.values(), key=lambda line: line.start + line.cost)
        return next(reversed(longest.waiters))


class FairQueue:
    """The waiters of one model.

    Args:
        aging_s: how long a waiter stays in a class before it moves up.
    """

    def __init__(self, aging_s: float) -> None:
        self.aging_s = aging_s
        self.tokens = 0
        self._length = 0
        self._classes = tuple(_Class() for _ in Priority)

    def __len__(self) -> int:
        return self._length

    def push(self, waiter: Waiter) -> None:
        """Let a waiter in."""
        self._classes[waiter.priority].add(waiter)
        waiter.queued = True
        self._length += 1
        self.tokens += waiter.tokens

    def remove(self, waiter: Waiter) -> None:
        """Take out a waiter that gives up or is pushed out."""
        self._classes[waiter.priority].remove(waiter)
        self._forget(waiter)

    def next(self, now: float) -> Waiter:
        """Return who is to be served next; :meth:`serve` takes it out.

        Args:
            now: seconds on the clock that ``Waiter.since`` was read from.

        Raises:
            IndexError: nobody waits.
        """
        self._age(now)
        for kind in self._classes:
            if kind.arrivals:
                return kind.next()
        raise IndexError("nobody waits")

    def serve(self, waiter: Waiter) -> None:
        """Take out what :meth:`next` returned."""
        self._classes[waiter.priority].serve(waiter)
        self._forget(waiter)

    def yields_to(self, newcomer: Waiter) -> Waiter | None:
        """Say who leaves a full queue for a newcomer: the newest of who has most waiting.

        A class keeps ``RESERVED_FRACTION`` of the queue against the others. Beyond that a lower
        class yields to a higher one; inside a class a caller yields to one with less waiting.

        Args:
            newcomer: not in the queue.

        Returns:
            The one to remove; None if the newcomer itself has the weakest claim.
        """
        reserved = int(self._length * RESERVED_FRACTION)
        own = self._classes[newcomer.priority]
        over = [p for p in Priority if len(self._classes[p].arrivals) > reserved]
        if over and over[-1] > newcomer.priority:
            return self._classes[over[-1]].last()
        if own.arrivals:
            victim = own.last()
            if own.backlog(victim.key) > own.backlog(newcomer.key) + newcomer.cost:
                return victim
        if len(own.arrivals) < reserved and over:
            return self._classes[over[-1]].last()
        return None

    def _forget(self, waiter: Waiter) -> None:
        waiter.queued = False
        self._length -= 1
        self.tokens -= waiter.tokens

    def _age(self, now: float) -> None:
        for priority in (Priority.NORMAL, Priority.LOW):
            kind = self._classes[priority]
            while kind.arrivals:
                oldest = next(iter(kind.arrivals))
                if now - oldest.since < self.aging_s:
                    break
                kind.remove(oldest)
                # It stands at the end of the class above, as if it had come now.
                oldest.since = now
                oldest.priority = Priority(priority - 1)
                self._classes[oldest.priority].add(oldest)
