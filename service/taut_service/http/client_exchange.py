"""What uvicorn knows of a request and ASGI does not say: cheaper ways for the two hot routes.

A request whose body has arrived needs no ``receive``, a client that leaves is noticed without a
task that waits for it, and a whole answer goes out in one system call instead of two: uvloop
writes at once, head and body each. :class:`taut_service.http.protocol.BoundedHttpProtocol` puts one
of these into the scope of every request under ``SCOPE_KEY``; behind another server there is none,
and the ASGI callables are used.

It reads and sets attributes of uvicorn's ``RequestResponseCycle`` (no underscore, but no written
contract either): whoever moves uvicorn runs ``tests/service/test_client_exchange.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from taut_service.errors import Headers
from taut_service.http.sse import SseReframer

if TYPE_CHECKING:
    from taut_service.http.cycle import Cycle

SCOPE_KEY: Final = "taut.client_exchange"
LARGE_BODY: Final = 64 * 1024
"""From this size on a copy costs more than a second system call."""


class ClientExchange:
    """One request and its answer on a client's connection.

    Args:
        cycle: uvicorn's, as it is made here.
    """

    __slots__ = ("_events", "_on_disconnect", "_until_close", "cycle")

    def __init__(self, cycle: Cycle) -> None:
        self.cycle = cycle
        self._on_disconnect: Callable[[], None] | None = None
        self._until_close = False
        self._events: SseReframer | None = None

    @property
    def answered(self) -> bool:
        """Whether the whole answer has been written, or nobody is left to read it."""
        return self.cycle.response_complete or self.cycle.disconnected

    def take_body(self) -> bytes | None:
        """Return the body if all of it has arrived, else None: it must be received."""
        cycle = self.cycle
        if cycle.more_body or cycle.waiting_for_100_continue or cycle.disconnected:
            return None
        body = cycle.body
        cycle.body = b""
        cycle.message_event.clear()
        return bytes(body)

    def watch(self, on_disconnect: Callable[[], None]) -> None:
        """Have a function called when the client leaves; at once if it has left."""
        if self.cycle.disconnected:
            on_disconnect()
        else:
            self._on_disconnect = on_disconnect

    def unwatch(self) -> None:
        """Call it no more."""
        self._on_disconnect = None

    def client_left(self) -> None:
        """Tell that the connection was lost; called by the protocol."""
        if self._on_disconnect is not None:
            self._on_disconnect()

    def carry_events(self, events: SseReframer) -> None:
        """Take note that the answer has begun and is a stream of events, a write a whole number."""
        self._events = events

    @property
    def takes_events(self) -> bool:
        """Whether :meth:`write_events` may be used: a stream has begun, and its client keeps up."""
        cycle = self.cycle
        framed = self._until_close or cycle.chunked_encoding is True
        return framed and not cycle.disconnected and not cycle.flow.write_paused

    def write_events(self, events: bytes) -> bool:
        """Write a part of a stream that has begun, as ``send`` would.

        Args:
            events: not empty.

        Returns:
            Whether the client keeps up; if it does not, ``send`` knows how to wait.
        """
        cycle = self.cycle
        if cycle.disconnected:
            return False
        cycle.transport.write(
            events if self._until_close else b"%x\r\n%b\r\n" % (len(events), events)
        )
        return not cycle.flow.write_paused

    def ask_whether_there(self) -> bool:
        """Send what a client ignores, and the system of a client that has left answers by a reset.

        Before an answer that is an interim one (RFC 9110 §15.2), which HTTP/1.0 does not know, in
        a stream a comment. Within a document there is nothing, but its pieces do the same.

        Returns:
            False if the client can only be taken for one that has left.
        """
        cycle, events = self.cycle, self._events
        if self.answered:
            return False
        if not cycle.response_started:
            if cycle.scope["http_version"] != "1.1":
                return False
            cycle.waiting_for_100_continue = False
            cycle.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif events is not None and events.whole and not cycle.flow.write_paused:
            cycle.transport.write(b":\n\n" if self._until_close else b"3\r\n:\n\n\r\n")
        return True

    async def send_until_close(self, message: Message) -> None:
        """Send an answer of unknown length to a client of HTTP/1.0, which knows no chunks.

        The end of the connection is the end of the answer (RFC 9112 §6.3).

        Args:
            message: of ASGI.
        """
        cycle = self.cycle
        if message["type"] == "http.response.start":
            lengths = (name == b"content-length" for name, _ in message["headers"])
            self._until_close = cycle.scope["method"] != "HEAD" and not any(lengths)
            if self._until_close:
                cycle.response_started = True
                lines = [STATUS_LINE[message["status"]]]
                for name, value in (*cycle.default_headers, *message["headers"]):
                    lines += (name, b": ", value, b"\r\n")
                cycle.transport.write(b"".join((*lines, b"connection: close\r\n\r\n")))
                return
        if not self._until_close:
            await cycle.send(cast("Any", message))
            return
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        cycle.transport.write(message.get("body", b""))
        if not message.get("more_body", False):
            cycle.response_complete = True
            cycle.message_event.set()
            cycle.transport.close()
            cycle.on_response()

    @property
    def takes_answer(self) -> bool:
        """Whether :meth:`respond` can send an answer now."""
        cycle = self.cycle
        return cycle.disconnected or not (cycle.response_started or cycle.flow.write_paused)

    def respond(self, status: int, headers: Headers, body: bytes) -> bool:
        """Send a whole answer.

        Args:
            status: of HTTP.
            headers: names in lower case, ``content-length`` among them, no hop-by-hop field. They
                are ours or a worker's, of which llhttp has refused any that could end a line.
            body: all of it.

        Returns:
            Whether it is sent. False: a part of an answer is out, or the client is slow to read
            earlier ones; ``send`` knows how to wait.
        """
        cycle = self.cycle
        if cycle.disconnected:
            return True
        if cycle.response_started or cycle.flow.write_paused:
            return False
        if cycle.scope["method"] == "HEAD":
            body = b""
        lines = [STATUS_LINE[status]]
        _write_fields(lines, cycle.default_headers)
        _write_fields(lines, headers)
        lines.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        if len(body) < LARGE_BODY:
            lines.append(body)
            cycle.transport.write(b"".join(lines))
        else:
            cycle.transport.write(b"".join(lines))
            cycle.transport.write(body)
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True


def _write_fields(lines: list[bytes], fields: Headers) -> None:
    # Compiled, four appends cost less than a tuple of four.
    for name, value in fields:
        lines.append(name)
        lines.append(b": ")
        lines.append(value)
        lines.append(b"\r\n")
