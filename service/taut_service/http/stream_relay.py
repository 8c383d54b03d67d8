"""Carries a stream of events from a worker to a client, each as soon as it is whole.

The head is held until the first event. From then on events go from one socket to the other within
the call that brings them, without a turn of the request's task: that is most of what an event
costs. The task takes over where the client reads too slowly, and at the end.
"""

from __future__ import annotations

import time

from starlette.types import Send

from taut_service.call import Call
from taut_service.errors import Headers
from taut_service.http.answer_failures import broken_before, failure_of
from taut_service.http.sse import SseReframer
from taut_service.worker.connection import Connection
from taut_service.worker.upstream_errors import ConnectionLostError, UpstreamError


class _Events:
    """The events of one answer, framed anew and timed.

    Args:
        call: the request.
        connection: to the worker.
    """

    __slots__ = ("_call", "_connection", "_first", "_last", "_preamble", "_tap", "reframer")

    def __init__(self, call: Call, connection: Connection) -> None:
        counts = call.admitted.reservation is not None
        self.reframer = SseReframer(count_text=counts, rewrite=call.rewrite)
        self._call = call
        self._connection = connection
        self._preamble = call.route.preamble
        self._tap = call.tap
        self._first = self._last = 0.0

    def of(self, data: bytes) -> bytes:
        """Return the events that are whole with these bytes, perhaps none."""
        reframer = self.reframer
        before = reframer.events
        events = reframer.feed(data)
        after = reframer.events
        if after > before and after > self._preamble and events:
            self._connection.await_next_event()
            now = time.perf_counter()
            if self._last:
                self._call.metrics.next_tokens(now - self._last, after - before)
            else:
                self._first = now
                self._call.metrics.first_token(now - self._call.started)
            self._last = now
        if events and self._tap is not None:
            self._tap.hear(events)
        return events

    def rest(self) -> bytes | None:
        """Return what is left at the end, as :meth:`.SseReframer.flush` does."""
        rest = self.reframer.flush()
        if rest and self._tap is not None:
            self._tap.hear(rest)
        return rest

    def pass_on(self, data: bytes) -> bool:
        """Write the events that are whole with these bytes; return whether more may come."""
        events = self.of(data)
        exchange = self._call.exchange
        return not events or (exchange is not None and exchange.write_events(events))

    def account(self) -> None:
        """Write down what the client got."""
        answer, reframer = self._call.answer, self.reframer
        answer.usage = reframer.usage
        answer.events = reframer.events
        answer.text_bytes = reframer.text_bytes
        if self._last:
            answer.first_token_s = self._first - self._call.started
            answer.rest_s = self._last - self._first


async def relay_stream(call: Call, connection: Connection, headers: Headers, send: Send) -> None:
    """Pass on a stream of events.

    Args:
        call: the request; gets status, usage and times.
        connection: to the worker, the head of whose answer has arrived.
        headers: for the client.
        send: the ASGI callable.

    Raises:
        GatewayError: it should be sent, as an event if ``call.streaming``.
        NothingSentError: nothing has been sent, and the worker is lost.
    """
    stream = _Events(call, connection)
    exchange = call.exchange
    connection.await_first_event()
    try:
        while data := await connection.read():
            events = stream.of(data)
            if not events:
                continue
            if not call.streaming:
                await _begin(call, connection.status, headers, stream.reframer, send)
            await send({"type": "http.response.body", "body": events, "more_body": True})
            if exchange is not None and exchange.takes_events:
                await connection.flow_into(stream.pass_on)
        rest = stream.rest()
        if rest is None:
            raise ConnectionLostError("the stream ended within an event")
    except UpstreamError as error:
        raise failure_of(error) if call.streaming else broken_before(error) from error
    finally:
        stream.account()
    if not call.streaming:
        await _begin(call, connection.status, headers, stream.reframer, send)
    await send({"type": "http.response.body", "body": rest})


async def _begin(
    call: Call, status: int, headers: Headers, events: SseReframer, send: Send
) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    # From here on an error can only be an event. Not before: ``send`` may be interrupted.
    call.answer.status = status
    call.streaming = True
    if call.exchange is not None:
        call.exchange.carry_events(events)
