"""One keep-alive HTTP/1.1 connection to a worker: bytes out, head and body pieces in.

Invariant: at most one exchange at a time; after ``abort`` or an error the connection is never
    used again. Reading stops (``pause_reading``) while more than ``HIGH_WATER`` bytes wait for
    the consumer, so that a slow client slows its worker down and costs the gateway a bounded
    amount of memory. The answer itself: :mod:`taut_service.worker.answer_reader`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

import httptools

from taut_service.config.settings import Timeouts
from taut_service.http.framing import BYTES_A_READ, MAX_HEAD_BYTES
from taut_service.timer import Timer
from taut_service.worker.answer_reader import AnswerReader
from taut_service.worker.upstream_errors import (
    ConnectionLostError,
    ProtocolError,
    StallError,
    UpstreamError,
)

HIGH_WATER: Final = 64 * 1024
"""Bytes of body held for a slow consumer before reading stops."""
NEVER: Final = float("inf")


class Connection(AnswerReader):
    """What asyncio calls a protocol; made by :class:`taut_service.worker.upstream.UpstreamClient`.

    It does not inherit from ``asyncio.Protocol``: compiled, its fields would then be looked up by
    their names.

    Args:
        on_closed: told when the connection ends, so that a pool can forget it.
        timeouts: longest silences, in bytes and in events. Time in which the consumer reads
            nothing does not count.
    """

    __slots__ = (
        "_busy", "_deadline", "_error", "_event_deadline", "_first_byte_s", "_first_token_s",
        "_gap_s", "_idle_s", "_look_s", "_loop", "_on_closed", "_paused", "_sent_at", "_take",
        "_timer", "_transport", "_waiter",
    )  # fmt: skip

    def __init__(self, on_closed: Callable[[Connection], None], timeouts: Timeouts) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._on_closed = on_closed
        self._first_byte_s = timeouts.first_byte_s
        self._idle_s = timeouts.idle_s
        self._first_token_s = timeouts.first_token_s or NEVER
        self._gap_s = timeouts.gap_s or NEVER
        self._look_s = min(self._first_byte_s, self._idle_s, self._first_token_s, self._gap_s)
        self._transport: asyncio.Transport | None = None
        self._timer = Timer()
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], bool] | None = None
        self._busy = False
        self._paused = False
        self._sent_at = 0.0
        self._reset()

    def _reset(self) -> None:
        self._forget_answer()
        self._error: UpstreamError | None = None
        self._deadline = 0.0
        self._event_deadline = NEVER

    def send(self, head: bytes, body: bytes) -> None:
        """Send a request; :meth:`answered` waits for the head of its answer.

        Args:
            head: request line and headers, with the empty line.
            body: the body whose length the head gives.

        Raises:
            ConnectionLostError: it was closed before.
        """
        if self._transport is None:
            raise ConnectionLostError("closed before the request")
        self._reset()
        self._busy = True
        self._sent_at = now = self._loop.time()
        self._deadline = now + self._first_byte_s
        if self._timer.handle is None:
            self._timer.start(self._loop, self._look_s, self._check_deadline)
        # One system call for the usual request; no copy of a large one.
        if len(body) <= HIGH_WATER:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    async def exchange(self, head: bytes, body: bytes) -> None:
        """Do :meth:`send` and :meth:`answered`."""
        self.send(head, body)
        await self.answered()

    async def answered(self) -> None:
        """Wait for the head of the answer, then in ``status`` and ``headers``.

        Raises:
            UpstreamError: see the subclasses; the connection is then unusable.
        """
        while not self._head_done:
            if self._error is not None:
                raise self._error
            # As in _wait, which would be one more coroutine for every request.
            self._waiter = waiter = self._loop.create_future()
            try:
                await waiter
            finally:
                self._waiter = None

    def take_whole(self) -> bytes | None:
        """Return the body if all of it has arrived, else None: it must be read."""
        return self._take_pieces() if self._complete and not self._paused else None

    async def read(self) -> bytes:
        """Return everything of the body that has arrived since, ``b""`` at its end.

        Raises:
            UpstreamError: the body will not come whole.
        """
        while not self._pieces:
            if self._complete:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait()
        data = self._take_pieces()
        if self._paused and self._transport is not None:
            self._paused = False
            now = self._loop.time()
            self._deadline = now + self._idle_s
            self._event_deadline = max(self._event_deadline, now + self._gap_s)
            self._transport.resume_reading()
        return data

    async def flow_into(self, take: Callable[[bytes], bool]) -> None:
        """Hand what arrives to a function as it arrives; return when that is over.

        So it is when the body ends, when it will not come whole, when ``take`` returns False, and
        at once while something waits to be read: :meth:`read` then goes on.

        Args:
            take: gets the body of each read.
        """
        if self._pieces or self._paused:
            return
        self._take = take
        try:
            while self._take is not None and not self._complete and self._error is None:
                await self._wait()
        finally:
            self._take = None

    def await_first_event(self) -> None:
        """Count from the request on how long the first event of a stream takes."""
        self._event_deadline = self._sent_at + self._first_token_s

    def await_next_event(self) -> None:
        """Count from now on how long the next event takes."""
        self._event_deadline = self._loop.time() + self._gap_s

    @property
    def alive(self) -> bool:
        """Whether the socket is open as far as this side knows."""
        return self._transport is not None and not self._transport.is_closing()

    def finish(self) -> bool:
        """End the exchange; return whether the connection may carry another, else close it."""
        if self._complete and self._keep_alive and self.alive and not self._paused:
            self._busy = False
            return True
        self.abort()
        return False

    def abort(self) -> None:
        """Close now; to a worker in the middle of an answer this says to stop generating."""
        self._timer.stop()
        self._busy = False
        # Its traceback holds frames that hold the request, and they hold this.
        self._error = None
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: UpstreamError) -> None:
        if self._error is None and not self._complete:
            self._error = error
        self._wake()

    def _check_deadline(self) -> None:
        # One timer a connection, re-armed when it fires early, instead of one an exchange or a
        # chunk. It may be left over from an exchange before: that makes it early, never late.
        now = self._loop.time()
        if not self._busy or self._complete or self._error is not None:
            return
        deadline = min(self._deadline, self._event_deadline)
        # While the consumer is behind, the silence is the client's and not the worker's.
        behind = self._paused or bool(self._pieces)
        if now < deadline or behind:
            pause = self._look_s if behind else min(deadline - now, self._look_s)
            self._timer.start(self._loop, pause, self._check_deadline)
            return
        self._fail(StallError("no answer" if not self.got_bytes else "silence within the answer"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # A cast, since uvloop's transports do not inherit from asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse what came; wake the consumer once a read, not once a chunk."""
        if not self._busy:
            # A worker that talks between requests has lost count of them: its next answer could
            # be someone else's.
            self.abort()
            self._on_closed(self)
            return
        self.got_bytes = True
        framing = self._framing
        framing.size = size = len(data)
        self.received += size
        held, pieces = self._buffered, len(self._pieces)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._keep_alive = False
            self._fail(ProtocolError(str(error)))
            return
        body = self._buffered - held
        if not framing.open or (body and size - body <= BYTES_A_READ):
            framing.dry = 0
            self._deadline = self._loop.time() + self._idle_s
        elif not self._within_bounds(body, len(self._pieces) - pieces):
            return
        if self._take is not None:
            self._hand_over(self._take)
        elif not self._head_done and self.received > MAX_HEAD_BYTES:
            self._fail(ProtocolError("the response head is too long"))
        elif self._buffered > HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        if self._take is None or self._complete:
            self._wake()

    def _hand_over(self, take: Callable[[bytes], bool]) -> None:
        if self._pieces and not take(self._take_pieces()):
            self._take = None

    def _within_bounds(self, body: int, pieces: int) -> bool:
        """Judge a read with little or no body in it; fail and return False where it is too much."""
        framing = self._framing
        framing.body = body
        framing.pieces += pieces
        problem = framing.read_problem()
        if problem is not None:
            self._keep_alive = False
            self._fail(ProtocolError(problem))
            return False
        # What is neither the beginning of a head nor body is no sign of work: neither are trailers
        # that never end.
        if framing.dry < 2:
            self._deadline = self._loop.time() + self._idle_s
        return True

    def connection_lost(self, error: Exception | None) -> None:
        """End the exchange: well, if the body was to last until close, else as an error."""
        self._transport = None
        self._timer.stop()
        self._on_closed(self)
        if self._busy and not self._complete:
            if self._head_done and self._until_close and error is None:
                self._complete = True
                self._wake()
            else:
                self._fail(ConnectionLostError("closed by the worker"))

    def eof_received(self) -> bool:
        """Close: a worker that sends no more has nothing to be asked."""
        return False

    def pause_writing(self) -> None:
        """Go on: what is written is one request, and its body is held anyway."""

    def resume_writing(self) -> None:
        """Go on."""
