"""Calls after one and the same time, nearly all of which are taken back before it has passed.

A timer of the event loop for each request, or each idle connection, costs more than anything else
that is done to count it: it is made, put in order among all others, and cancelled. Here the order
is that of the arrivals, and one timer of the loop looks after the oldest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Expiry:
    """Belongs to one event loop, the one that runs when it is first used.

    Args:
        seconds: from :meth:`start` to the call.
    """

    __slots__ = ("_handle", "_last", "_waiting", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        # In the order of their times, since all wait for as long.
        self._waiting: dict[int, tuple[float, Callable[[], None]]] = {}
        self._last = 0
        self._handle: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """How many calls are to come."""
        return len(self._waiting)

    def start(self, call: Callable[[], None]) -> int:
        """Have a function called.

        Args:
            call: called once, unless it is taken back.

        Returns:
            A number for :meth:`stop`, never 0.
        """
        loop = asyncio.get_running_loop()
        self._last = number = self._last + 1
        self._waiting[number] = loop.time() + self.seconds, call
        if self._handle is None:
            self._handle = loop.call_later(self.seconds, self._look)
        return number

    def stop(self, number: int) -> None:
        """Take a call back; one that was made, or taken back already, is none."""
        self._waiting.pop(number, None)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        due = []
        for number, (at, _) in self._waiting.items():
            if at > now:
                break
            due.append(number)
        try:
            for number in due:
                # One of them may take another one back.
                found = self._waiting.pop(number, None)
                if found is not None:
                    found[1]()
        finally:
            # Until here the old timer stands: whoever starts to wait meanwhile makes none. A call
            # that raises keeps no other one waiting: what is left is due at once.
            self._handle = None
            for at, _ in self._waiting.values():
                self._handle = loop.call_later(at - now, self._look)
                break
