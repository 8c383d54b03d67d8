"""What is watched while one direction of a client's connection stands still.

A connection that is not read does not notice that its client has left: the event loop asks the
kernel for readable sockets, and the end waits behind what has not been read. So while reading is
paused the socket itself is asked now and then.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Sized

from uvicorn.protocols.http.flow_control import FlowControl

LOOK_S = 0.25
"""Between two questions whether the client of a connection that is not read is still there."""
# Not in every system's module; a hang-up is reported unasked.
_ENDED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class ClientFlow(FlowControl):
    """uvicorn's flow control of one connection, with an eye on the client.

    Args:
        transport: of the connection.
        loop: that runs it.
        ahead: requests that wait for their turn; while there are any, nothing more is read.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, ahead: Sized
    ) -> None:
        super().__init__(transport)
        self._loop = loop
        self._ahead = ahead
        self._given_up = False
        self._look: asyncio.TimerHandle | None = None

    def pause_reading(self) -> None:
        """Read no more, but look whether the client leaves."""
        super().pause_reading()
        if self._look is None:
            self._look = self._loop.call_later(LOOK_S, self._look_for_end)

    def resume_reading(self) -> None:
        """Read on, unless requests wait or nothing more is wanted."""
        if not self.read_paused or self._ahead or self._given_up:
            return
        self._stop_looking()
        super().resume_reading()

    def give_up_reading(self) -> None:
        """Read no more for good: what came cannot be understood."""
        self._given_up = True
        self.pause_reading()

    def close(self) -> None:
        """Stop watching; the connection is lost."""
        self._stop_looking()
        self._given_up = True

    def _look_for_end(self) -> None:
        self._look = None
        if _has_ended(self._transport):
            self._transport.abort()
        elif self.read_paused:
            self._look = self._loop.call_later(LOOK_S, self._look_for_end)

    def _stop_looking(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None


def _has_ended(transport: asyncio.Transport) -> bool:
    """Whether the other side has closed or reset, whatever of it is still to be read."""
    descriptor = transport.get_extra_info("socket").fileno()
    if descriptor < 0:
        return False  # closing already
    poll = select.poll()
    poll.register(descriptor, _ENDED)
    return bool(poll.poll(0))
