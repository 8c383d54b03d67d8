"""uvicorn's HTTP protocol with the bounds it lacks, of :mod:`taut_service.http.framing`.

Without them a client can keep a connection for ever by sending nothing, or fill the memory with
one endless header, with trailers, or with requests sent ahead. It also refuses what two servers
could read differently (RFC 9112 §2.3, §3.2, §6.1): a missing or second ``Host``, a version other
than 1.0 and 1.1, a transfer coding other than ``chunked``. What is not HTTP at all gets the same
error shape as everything else.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

import httptools
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from taut_service.http.client_exchange import SCOPE_KEY, ClientExchange
from taut_service.http.client_flow import ClientFlow
from taut_service.http.client_rules import DESCRIPTORS, ClientRules
from taut_service.http.cycle import Cycle, scope_of
from taut_service.http.descriptors import number_of
from taut_service.http.error_answer import invalid_http
from taut_service.http.framing import (
    FRAMING_TIMEOUT_S,
    MAX_FIELDS,
    MAX_HEAD_BYTES,
    TOO_MANY_FIELDS,
    Framing,
)
from taut_service.http.request_head import why_ambiguous
from taut_service.http.resumed_parser import parser_of_body
from taut_service.http.trailers import Trailers
from taut_service.timer import Timer

_NUMBERS = itertools.count()
_NOT_HTTP = "Invalid HTTP request received."
MAX_PIPELINED = 64
"""Requests sent ahead of the answer to the one before; the connection ends after that many."""
_HIGH_WATER = 64 * 1024
"""Bytes of body held before reading stops, as uvicorn does."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One client connection. Costs next to nothing while requests arrive whole, in one read.

    Where uvicorn's own way costs as much as the rest of a small request, it is gone again here, to
    the same end: the scope is made at once, a known target is not parsed, and idle connections
    share a timer.
    """

    flow: ClientFlow
    cycle: Cycle
    _exchange: ClientExchange | None = None
    _refusal: str | None = None

    def __init__(self, *args: Any, rules: ClientRules, **named: Any) -> None:
        super().__init__(*args, **named)
        self._rules = rules
        self._timer = Timer()
        self._idle = 0
        self._idle_from = 0.0
        self._idle_in = rules.unread

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self.flow = ClientFlow(
            transport, self.loop, self.pipeline, self._rules, self._ask_whether_there
        )
        self._framing = Framing()
        self._trailers = Trailers()
        self._wait_for_framing()
        self.number = next(_NUMBERS)
        reserve = self._rules.descriptors
        everybody = cast("set[BoundedHttpProtocol]", self.connections)
        if reserve is not None and reserve.is_touched_by(number_of(transport), len(everybody)):
            reserve.make_room(self, [one for one in everybody if not one.transport.is_closing()])

    @property
    def idle_since(self) -> float | None:
        """When the last request ended, or the first could have begun; None while one runs."""
        if self._running() is not None:
            return None
        if self._timer.handle is not None:
            return self._timer.handle.when() - FRAMING_TIMEOUT_S
        return self._idle_from if self._idle else self.loop.time()

    def drop(self) -> None:
        """Close at once: its descriptor is wanted."""
        self._rules.closed(DESCRIPTORS)
        self.transport.abort()

    def _on_last_response(self) -> None:
        """End the connection's last answer; see that what is left of it is taken."""
        self.on_response_complete()
        self.flow.watch_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; see that what is left of the answer is taken."""
        super().timeout_keep_alive_handler()
        self.flow.watch_writing()

    def _unset_keepalive_if_required(self) -> None:
        if self._idle:
            self._idle_in.stop(self._idle)
            self._idle = 0
            if self.flow.watches_rest:
                self.flow.leave_rest()

    def on_response_complete(self) -> None:
        """Go on with the next request sent ahead, or begin to count how long none comes."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())  # type: ignore[arg-type]
        else:
            self._idle_from = self.loop.time()
            self._idle_in = self._rules.unread
            self._idle = self._idle_in.start(self._see_rest)

    def _see_rest(self) -> None:
        """See that what is left of the answer is taken; go on to count how long none comes."""
        self.flow.watch_rest()
        self._idle_in = self._rules.idle
        self._idle = self._idle_in.start(self.timeout_keep_alive_handler)

    def _start_asgi_task(self, cycle: Cycle, app: ASGIApp) -> None:  # type: ignore[override]
        """Start the application on a request whose turn it is, pipelined ones included."""
        self._exchange = exchange = ClientExchange(cycle)
        cast("dict[str, object]", cycle.scope)[SCOPE_KEY] = exchange
        if not cycle.keep_alive:
            cycle.on_response = self._on_last_response
        task = self.loop.create_task(cycle.run_asgi(app))  # type: ignore[arg-type]
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        if self.flow.read_paused:
            self.flow.resume_reading()

    def on_message_begin(self) -> None:
        """Begin a head."""
        framing = self._framing
        framing.open = framing.in_head = True
        framing.dry = framing.outside = framing.body = framing.pieces = 0
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_headers_complete(self) -> None:
        """End a head; what comes in fields from now on is a trailer, and dropped."""
        framing = self._framing
        if self._timer.handle is not None:
            self._timer.stop()
        if framing.outside or not 0 < framing.size <= MAX_HEAD_BYTES:
            refusal = framing.head_problem(self.headers, self.url)
        elif len(self.headers) > MAX_FIELDS:
            refusal = TOO_MANY_FIELDS
        else:
            refusal = None
            framing.in_head = False
            framing.size = 0
        version = self.parser.get_http_version()
        if refusal is None:
            refusal = why_ambiguous(version, self.headers)
        if refusal is None and len(self.pipeline) >= MAX_PIPELINED:
            refusal = f"more than {MAX_PIPELINED} requests were sent ahead"
        if refusal is not None:
            # The parser turns it into its own error, which ends in send_400_response.
            framing.in_head = True
            self._refusal = refusal
            raise ValueError(refusal)
        self._begin_request(version)
        self.headers = self._trailers
        self._trailers.seen = 0

    def _begin_request(self, version: str) -> None:
        """Have the request answered, or wait for its turn."""
        before = self.cycle
        keep_alive = version != "1.0" and self.parser.should_keep_alive()
        self.cycle = Cycle(self, scope_of(self, version), keep_alive=keep_alive)
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, cast("ASGIApp", self.app))
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def on_body(self, body: bytes) -> None:
        """Hold a piece of body, unless the request has been answered without it."""
        framing = self._framing
        framing.body += len(body)
        framing.pieces += 1
        cycle = self.cycle
        if cycle.response_complete:
            return
        held = cycle.body
        if not held:
            # Usually all of it: no copy.
            cycle.body = body
        elif type(held) is bytearray:
            held += body
        else:
            cycle.body = bytearray(held) + body
        if len(cycle.body) > _HIGH_WATER:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        """End a request; read on, since only so is a client noticed that leaves."""
        framing = self._framing
        framing.open = framing.in_head = False
        framing.size = 0
        if self._timer.handle is not None:
            self._timer.stop()
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.more_body = False
            cycle.message_event.set()
        if self.flow.read_paused:
            self.flow.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Parse; bound what is still incomplete after it."""
        framing = self._framing
        framing.size = len(data)
        if self._idle:
            self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.logger.warning(_NOT_HTTP)
            self.send_400_response(_NOT_HTTP)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
            return
        if (framing.open or framing.size) and not self.transport.is_closing():
            self._bound_framing()

    def _decline_upgrade(self, rest: bytes) -> None:
        """Go on with a request that offers another protocol."""
        parser = parser_of_body(self, self.cycle)
        if parser is not None:
            self._framing.open = True
            self.parser = parser
            if rest:
                self.data_received(rest)
        elif rest or self.cycle.scope["method"] == "CONNECT":
            # What follows is not for this server to read.
            self._end_after(self.cycle)

    def _bound_framing(self) -> None:
        """Bound an unfinished request, or line ends between two."""
        framing = self._framing
        refusal = framing.read_problem()
        if refusal is not None:
            self._refusal = refusal
            self.send_400_response(refusal)
            return
        # A request that has been answered is read to its end, but not for ever.
        answered = framing.open and not framing.in_head and self.cycle.response_complete
        if answered or not framing.open or framing.in_head or framing.dry > 1:
            if self._timer.handle is None:
                self._wait_for_framing()
        else:
            self._timer.stop()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Go on for a client that sends no more but may still read its answers; then close."""
        running = self._running()
        if running is None or self._framing.open or not self.flow.end_reading():
            return False
        last = self.pipeline[0][0] if self.pipeline else running
        last.keep_alive = False
        last.on_response = self._on_last_response
        return True

    def _ask_whether_there(self) -> bool:
        # TLS has no closed half: its transport ends with the first one.
        exchange = self._exchange
        return self.scheme == "http" and exchange is not None and exchange.ask_whether_there()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._timer.stop()
        self.flow.close()
        # uvicorn tells the last request only; it may be one that waits for its turn.
        if (running := self._running()) is not None:
            running.disconnected = True
            running.message_event.set()
        self.pipeline.clear()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if self._exchange is not None:
            self._exchange.client_left()

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed, if it is its turn, and close."""
        if not self._framing.in_head and self.pipeline:
            # Its own turn has not come, and its body never will.
            self.pipeline.popleft()
        elif not self._framing.in_head:
            self._end_running(msg)
            return
        last = self.pipeline[0][0] if self.pipeline else self._running()
        if last is None:
            self._write_400(msg)
        else:
            # The requests before it are answered first; the connection then ends without a word.
            self._end_after(cast("Cycle", last))

    def _end_after(self, last: Cycle) -> None:
        """Close once a request has been answered; read nothing more."""
        last.keep_alive = False
        last.on_response = self._on_last_response
        self.flow.give_up_reading()

    def _end_running(self, msg: str) -> None:
        """End the request that is being answered, since its body or trailers are wrong."""
        cycle = self.cycle
        if cycle is None or not cycle.response_started:
            self._write_400(msg)
        else:
            self.transport.close()
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if self._exchange is not None:
            self._exchange.client_left()

    def _running(self) -> Cycle | None:
        exchange = self._exchange
        return None if exchange is None or exchange.answered else exchange.cycle

    def _write_400(self, msg: str) -> None:
        self.transport.write(invalid_http(self._refusal or msg))
        self.transport.close()

    def _wait_for_framing(self) -> None:
        self._timer.start(self.loop, FRAMING_TIMEOUT_S, self._give_up)

    def _give_up(self) -> None:
        if self.flow.read_paused:
            # The silence is this side's.
            self._wait_for_framing()
        else:
            self.transport.close()
