"""A call that the event loop makes later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Timer:
    """At most one call is pending; ``handle`` is None while there is none.

    It holds no function while it does not run: whoever has a timer call a method of its own is no
    cycle for the garbage collector once the timer has stopped.
    """

    __slots__ = ("handle",)

    def __init__(self) -> None:
        self.handle: asyncio.TimerHandle | None = None

    def start(
        self, loop: asyncio.AbstractEventLoop, seconds: float, call: Callable[[], None]
    ) -> None:
        """Call a function after some seconds, and not the one before."""
        self.stop()
        self.handle = loop.call_later(seconds, self._end, call)

    def stop(self) -> None:
        """Call nothing."""
        if self.handle is not None:
            self.handle.cancel()
            self.handle = None

    def _end(self, call: Callable[[], None]) -> None:
        self.handle = None
        call()
