"""What is watched while one direction of a client's connection stands still.

A client that does not read its answer holds a place at a worker, and later what is left of the
answer. So while bytes wait to be written, what the client takes of them is measured. The kernel's
part is counted, too: it asks for more only when a third of megabytes has gone.

A connection that is not read does not notice that its client has left: the event loop asks the
kernel for readable sockets, and the end waits behind what has not been read. So while reading is
paused the socket itself is asked now and then.

A client that closes its sending side only (``shutdown``, ``nc -N``) still wants its answer; to TCP
it looks like one that has left. Only the latter's system resets the connection when something is
sent to it (RFC 9293 §3.10.7). So something is sent that a client ignores, and the socket is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import select
import socket
import struct
import termios
from collections.abc import Callable, Sized

from uvicorn.protocols.http.flow_control import FlowControl

from taut_service.http.client_rules import SLOW_READER, ClientRules
from taut_service.http.request_head import Signal
from taut_service.timer import Timer

LOOK_S = 0.25
"""Between two questions whether the client of a connection that is not read is still there."""
FIRST_LOOK_S = 0.002
"""After something was sent to a client that sends no more; doubled for each look up to LOOK_S."""
ASK_AGAIN_S = 5.0
"""A client that sends no more can leave without another word."""
# Not in every system's module; a hang-up is always reported.
_SENDS_NO_MORE = getattr(select, "POLLRDHUP", 0)
_GONE = select.POLLHUP | select.POLLERR


class ClientFlow(FlowControl):
    """uvicorn's flow control of one connection, with an eye on the client.

    Args:
        transport: of the connection.
        loop: that runs it.
        ahead: requests that wait for their turn; while there are any, nothing more is read.
        rules: of the listener.
        ask: sends a client that sends no more what it ignores if it is there; False if it can only
            have left.

    ``watches_rest`` says whether what is left of an answer that has ended is watched.
    """

    watches_rest = False

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        ahead: Sized,
        rules: ClientRules,
        ask: Callable[[], bool],
    ) -> None:
        # Not the parent's, whose event is larger than all else here.
        self._transport = transport
        self.read_paused = self.write_paused = False
        self._is_writable_event = Signal()  # type: ignore[assignment]
        self._is_writable_event.set()
        self._loop = loop
        self._ask = ask
        self._ask_at: float | None = None
        self._look_s = LOOK_S
        self._all_read = False
        self._ahead = ahead
        self._given_up = False
        self._rules = rules
        self._look = Timer()
        self._write_timer = Timer()
        self._unread = 0

    def pause_reading(self) -> None:
        """Read no more, but look whether the client leaves."""
        if self._all_read:
            return
        super().pause_reading()
        if self._look.handle is None:
            self._look_later()

    def resume_reading(self) -> None:
        """Read on, unless requests wait or nothing more is wanted."""
        if not self.read_paused or self._ahead or self._given_up:
            return
        self._look.stop()
        super().resume_reading()

    def end_reading(self) -> bool:
        """Take note that the client sends no more, all of it having been read.

        Returns:
            Whether the client may still be there.
        """
        self._all_read = True
        self._look.stop()
        return self._ask_client()

    def give_up_reading(self) -> None:
        """Read no more for good: what came cannot be understood."""
        self._given_up = True
        self.pause_reading()

    def pause_writing(self) -> None:
        """Hold what is to be written; measure how fast it goes."""
        super().pause_writing()
        self.watch_writing()

    def resume_writing(self) -> None:
        """Write on."""
        super().resume_writing()
        if self._write_timer.handle is None or self.watches_rest or self._transport.is_closing():
            return
        self._write_timer.stop()

    def watch_writing(self) -> None:
        """Cut the client off if it takes too little of what waits for it."""
        if self._write_timer.handle is None and self._transport.get_write_buffer_size():
            self._unread = _unread(self._transport)
            self._measure_later()

    def watch_rest(self) -> None:
        """Do so after the end of an answer: the kernel may have all that is left of it."""
        self.watches_rest = True
        if self._write_timer.handle is None and (unread := _unread(self._transport)):
            self._unread = unread
            self._measure_later()

    def leave_rest(self) -> None:
        """Watch it no more: the client has sent something, and what follows is written after it."""
        self.watches_rest = False
        if not self.write_paused:
            self._write_timer.stop()

    def _measure_later(self) -> None:
        self._window_s = self._rules.timeouts().write_s
        self._write_timer.start(self._loop, self._window_s, self._measure)

    def _measure(self) -> None:
        before, self._unread = self._unread, _unread(self._transport)
        if not self._unread:
            return
        least = self._window_s * self._rules.timeouts().write_min_bytes_per_s
        if before - self._unread < max(1, least):
            self._rules.closed(SLOW_READER)
            _reset(self._transport)
        else:
            self._measure_later()

    def close(self) -> None:
        """Stop watching; the connection is lost."""
        self._look.stop()
        self._write_timer.stop()
        self._given_up = True

    def _look_later(self) -> None:
        self._look.start(self._loop, self._look_s, self._look_for_end)

    def _look_for_end(self) -> None:
        if self._transport.is_closing():
            return
        found = _looked_at(self._transport)
        if found & _GONE:
            self._transport.abort()
            return
        if self._all_read or found & _SENDS_NO_MORE:
            asked = self._ask_at is not None and self._loop.time() < self._ask_at
            if not asked and not self._ask_client():
                self._transport.abort()
                return
            self._look_s = min(2 * self._look_s, LOOK_S)
        if self._look.handle is None and (self._all_read or self.read_paused):
            self._look_later()

    def _ask_client(self) -> bool:
        if not self._ask():
            return False
        self._ask_at = self._loop.time() + ASK_AGAIN_S
        self._look_s = FIRST_LOOK_S
        self._look_later()
        return True


def _unread(transport: asyncio.Transport) -> int:
    """Return how many bytes written are on their way, those in the kernel included."""
    waiting = transport.get_write_buffer_size()
    descriptor = transport.get_extra_info("socket").fileno()
    if descriptor < 0:
        return waiting
    try:
        # Linux: what the other side has not acknowledged. Elsewhere only this process's part.
        sent = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4))
    except OSError:
        return waiting
    return waiting + int(struct.unpack("i", sent)[0])


def _reset(transport: asyncio.Transport) -> None:
    """Close with a reset: what is in the kernel would stay there for as long as nobody reads it."""
    with contextlib.suppress(OSError):
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
    transport.abort()


def _looked_at(transport: asyncio.Transport) -> int:
    """Return what the socket says of the other side, whatever of it is still to be read."""
    descriptor = transport.get_extra_info("socket").fileno()
    if descriptor < 0:
        return 0  # closing already
    poll = select.poll()
    poll.register(descriptor, _SENDS_NO_MORE | _GONE)
    found = poll.poll(0)
    return found[0][1] if found else 0
