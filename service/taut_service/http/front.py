"""The raw ASGI front: answers the routes to workers itself, hands all others to FastAPI.

For a worker's route: method → drain → key → body → JSON → model → fields → limits, then
:class:`taut_service.route.gateway.Gateway`. FastAPI's own request handling would cost more than all
of that. Whatever happens, a request is counted and logged exactly once, in ``finally``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from taut_service.admit.auth import CALLER, ApiKeys
from taut_service.admit.byte_budget import FREE_BYTES
from taut_service.admit.claims import claim_of, timeout_of
from taut_service.admit.inspection import Facts, Inspector, inspect
from taut_service.admit.key_places import KeyPlaces
from taut_service.admit.limits.limiter import RateLimiter
from taut_service.admit.limits.settlement import settle
from taut_service.call import CLIENT_CLOSED, Call, Route
from taut_service.config.reload import Reloader
from taut_service.errors import (
    BodyTooLargeError,
    GatewayError,
    MethodNotAllowedError,
    UnauthorizedError,
)
from taut_service.expiry import Expiry
from taut_service.http.answer_failures import CutShortError
from taut_service.http.body import Bodies
from taut_service.http.client_exchange import SCOPE_KEY
from taut_service.http.cors import answer_page
from taut_service.http.error_answer import send_error
from taut_service.http.headers import REQUEST_ID, RequestHeaders, RequestIds
from taut_service.http.json_bounds import is_light
from taut_service.http.request_watch import ClientDisconnectedError, RequestWatch
from taut_service.http.rewrite import rewrite_for
from taut_service.route.gateway import Gateway
from taut_service.watch.access_log import AccessLog
from taut_service.watch.drain import Drain
from taut_service.watch.key_usage import KeyUsage
from taut_service.watch.metrics import UNKNOWN_MODEL, Metrics
from taut_service.watch.tracing import Tracing, trace_id_of
from taut_service.worker.outgoing import Outgoing

if TYPE_CHECKING:
    from taut_service.guard.guard import Guard

LAST_WORD_S = 1.0
"""Time to write an error to a client that may not be reading."""
_REASON_OF_CODE: Mapping[str | None, str] = {
    "queue_full": "queue_full",
    "queue_timeout": "queue_timeout",
    "total_timeout": "queue_timeout",
    "no_ready_worker": "no_ready_worker",
    "draining": "draining",
    "shutting_down": "draining",
    "invalid_api_key": "unauthorized",
    "request_too_large": "too_large",
    "too_many_bytes": "too_many_bytes",
    "permission_denied": "forbidden",
    "rate_limit_exceeded": "rate_limited",
    "request_exceeds_rate_limit": "rate_limited",
    "rate_limits_unavailable": "limits_unavailable",
    "key_inflight_limit": "key_inflight",
}
_OPEN_PATHS = ("/health/", "/metrics", "/docs", "/openapi.json")
_OPEN = frozenset({"/health", "/ping", "/version"})


@dataclass(eq=False, repr=False)
class Front:
    """The outermost ASGI callable.

    Args:
        api: the FastAPI application for every other path and for the lifespan.
        routes: path → route.
        gateway: answers checked requests.
        reloader: holds the configuration in force.
        keys: who may call.
        limiter: how much they may call.
        drain: whether the door is open.
        metrics: where requests are counted.
        usage: what each key has used.
        access_log: where they are written down.
        tracing: makes a span of each; None makes none.
        guard: compares a share of the answers; None compares none.
    """

    api: ASGIApp
    routes: Mapping[str, Route]
    gateway: Gateway
    reloader: Reloader
    keys: ApiKeys
    limiter: RateLimiter
    drain: Drain
    metrics: Metrics
    usage: KeyUsage
    access_log: AccessLog
    tracing: Tracing | None = None
    guard: Guard | None = None

    def __post_init__(self) -> None:
        self._key_places = KeyPlaces()
        self._ids = RequestIds()
        self._inspector = Inspector()
        self._bodies = Bodies()
        self._total = Expiry(self.reloader.current.settings.timeouts.total_s)
        self.admin: FastAPI | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it to FastAPI."""
        if scope["type"] != "http":
            await self.api(scope, receive, send)
            return
        # Out of the scope, which it points back at: no garbage for the collector.
        exchange = scope.pop(SCOPE_KEY, None)
        cors = self.reloader.current.settings.cors
        preflight = None if cors is None else answer_page(cors, scope, exchange)
        if preflight is not None:
            await send({"type": "http.response.start", "status": 204, "headers": preflight})
            await send({"type": "http.response.body", "body": b""})
            return
        route = self.routes.get(scope["path"])
        if route is None:
            await self._pass_to_api(scope, receive, send)
            return
        headers = RequestHeaders(scope["headers"], self._ids)
        metrics = self.metrics.route(UNKNOWN_MODEL, route.name)
        call = Call(route, headers.request_id, metrics)
        call.exchange = exchange
        if exchange is not None and scope["http_version"] == "1.0":
            send = exchange.send_until_close
        if self.tracing is not None:
            call.span, headers.passed_on = self.tracing.begin(call, headers.passed_on)
        watch = RequestWatch(receive, self._expiry())
        self.drain.enter(watch)
        try:
            with watch:
                await self._answer(call, scope, headers, receive, send, watch)
        except ClientDisconnectedError:
            call.answer.status = CLIENT_CLOSED
        except GatewayError as error:
            await self._answer_error(call, error, headers, send)
        except CutShortError:
            # Returning without the end of the body makes the server close the client's connection.
            call.answer.status = 502
        finally:
            self.drain.leave(watch)
            if call.admitted.holds_key_place and call.admitted.key is not None:
                self._key_places.give_back(call.admitted.key.name)
            self._account(call)

    def _expiry(self) -> Expiry:
        """Return what ends a request that begins now; those under way keep the time they had."""
        total_s = self.reloader.current.settings.timeouts.total_s
        if self._total.seconds != total_s:
            self._total = Expiry(total_s)
        return self._total

    async def _answer(
        self,
        call: Call,
        scope: Scope,
        headers: RequestHeaders,
        receive: Receive,
        send: Send,
        watch: RequestWatch,
    ) -> None:
        timeout_s = self._enter(call, scope["method"], headers)
        if timeout_s is not None:
            watch.shorten(timeout_s)
        caller = call.admitted.key
        exchange = call.exchange
        body = None if exchange is None else exchange.take_body()
        settings = self.reloader.current.settings
        if body is None or len(body) > FREE_BYTES or headers.content_coding is not None:
            body = await self._bodies.read(call, headers, receive, watch, settings, body)
        elif len(body) > settings.limits.max_body_bytes:
            raise BodyTooLargeError(settings.limits.max_body_bytes)
        watch.listen(exchange)
        if is_light(body):
            try:
                facts = inspect(call, body, self.reloader.current)
            finally:
                if call.model:
                    call.metrics = self.metrics.route(call.model, call.route.name)
        else:
            facts = await self._facts(call, body)
        call.rewrite = rewrite_for(
            facts.asked, hide_usage=facts.hides_usage, within=call.route.dialect.holder
        )
        query = scope["query_string"]
        path = call.route.path.encode() + (b"?" + query if query else b"")
        claim = claim_of(
            call, caller, headers, timeout_s, facts.cost.prompt + facts.cost.completion
        )
        if caller is not None and caller.limit is not None:
            reservation = self.limiter.reserve_now(caller.name, caller.limit, facts.cost)
            if reservation is None:
                reservation = await self.limiter.reserve(caller.name, caller.limit, facts.cost)
            call.admitted.reservation = reservation
            call.extra_headers = reservation.headers()
        request = Outgoing(path, headers, facts)
        model = facts.model
        # The request may be a copy with another model by the time it waits.
        del body, facts
        if self.guard is not None:
            self.guard.draw(call, model, request.body)
        may_pin = caller is None or caller.may_pin
        await self.gateway.answer(call, model, request, send, claim, may_pin=may_pin)

    async def _facts(self, call: Call, body: bytes) -> Facts:
        # Looked up when the body is there: a reload may have come in between.
        generation = self.reloader.current
        try:
            facts = await self._inspector.inspect(call, body, generation)
            if self.reloader.current is not generation:
                # So may one while a large body was read, in its turn.
                facts = await self._inspector.inspect(call, body, self.reloader.current)
        finally:
            if call.model:
                call.metrics = self.metrics.route(call.model, call.route.name)
        return facts

    def _enter(self, call: Call, method: str, headers: RequestHeaders) -> float | None:
        """Check what needs no body; return the client's time limit in seconds, None without."""
        if method != "POST":
            raise MethodNotAllowedError(method, "POST")
        self.drain.check_open()
        headers.check_framing()
        caller = self.keys.caller_of(headers.authorization)
        if caller is not None:
            call.admitted.key, call.admitted.caller = caller, caller.name
            headers.hide_authorization()
            call.admitted.holds_key_place = self._key_places.take(caller)
        return timeout_of(headers)

    async def _answer_error(
        self, call: Call, error: GatewayError, headers: RequestHeaders, send: Send
    ) -> None:
        if not call.routed.worker:
            self.metrics.rejected[_REASON_OF_CODE.get(error.code, "invalid")].inc()
        if call.answer.status and not call.streaming:
            return  # part of a document is out: the server closes the connection
        # A client that does not read must not hold the request open: without its end, the server
        # closes it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                if call.streaming:
                    call.answer.status = error.status
                    event = call.route.dialect.event(error, headers.request_id, call.answer.events)
                    await send({"type": "http.response.body", "body": event})
                else:
                    call.answer.status = error.status
                    close = headers.expects_continue or self.drain.draining
                    body = call.route.dialect.body(error, headers.request_id)
                    await send_error(
                        send,
                        error,
                        headers.request_id,
                        close=close,
                        body=body,
                        exchange=call.exchange,
                    )

    def _account(self, call: Call) -> None:
        seconds = time.perf_counter() - call.started
        if call.admitted.held is not None:
            call.admitted.held.release()
        if call.admitted.reservation is not None:
            settle(call, call.admitted.reservation)
        if call.answer.status in (0, CLIENT_CLOSED):
            call.metrics.abandoned()
        else:
            call.metrics.finished(call.answer.status, seconds, call.answer.usage)
        if call.routed.worker:
            variant = self.metrics.variant(call.model, call.routed.variant)
            left = call.answer.status in (0, CLIENT_CLOSED)
            variant.finished(0 if left else call.answer.status, seconds, call.answer.usage)
            cost = variant.cost_of(call.answer.usage)
            self.usage.count(call.admitted.caller, call.model, call.answer.usage, cost)
            events = call.answer.events - call.route.preamble
            if events > 0:
                variant.streamed(call.answer.first_token_s, call.answer.rest_s, events)
        if self.guard is not None:
            self.guard.served(call)
        if call.tap is not None:
            call.tap.finish(call)
        trace_id = ""
        if self.tracing is not None and call.span is not None:
            trace_id = trace_id_of(call.span)
            self.tracing.end(call.span, call)
        if self.access_log.enabled:
            self.access_log.request(call, seconds, trace_id)

    async def _pass_to_api(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = RequestHeaders(scope["headers"], self._ids)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    (REQUEST_ID, headers.request_id),
                ]
            await send(message)

        path = scope["path"].rstrip("/") or "/"
        if path not in _OPEN and not path.startswith(_OPEN_PATHS):
            try:
                scope[CALLER] = self.keys.caller_of(headers.authorization)
            except UnauthorizedError as error:
                self.metrics.rejected["unauthorized"].inc()
                await send_error(send, error, headers.request_id, close=headers.expects_continue)
                return
        # uvicorn keeps the body of an answer to HEAD back: it looks at its own scope.
        changed = {"method": "GET"} if scope["method"] == "HEAD" else {}
        await self.api({**scope, **changed, "path": path}, receive, send_with_id)
