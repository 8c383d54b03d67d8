"""The raw ASGI front: answers the routes to workers itself, hands all others to FastAPI.

For a worker's route: method → drain → key → body → JSON → model → fields, then
:class:`taut_service.gateway.Gateway`. FastAPI's own request handling would cost more than all of
that. Whatever happens, a request is counted and logged exactly once, in ``finally``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from taut_service.access_log import AccessLog
from taut_service.auth import ApiKeys
from taut_service.body import read_body
from taut_service.call import CLIENT_CLOSED, Call, Route
from taut_service.drain import Drain
from taut_service.errors import GatewayError, MethodNotAllowedError, UnauthorizedError
from taut_service.gateway import Gateway
from taut_service.headers import REQUEST_ID, RequestHeaders, RequestIds, request_head
from taut_service.metrics import UNKNOWN_MODEL, Metrics
from taut_service.relay import CutShortError, error_event
from taut_service.request_checks import (
    ModelLimits,
    check_fields,
    model_of,
    parse_body,
    require,
)
from taut_service.settings import Limits, Timeouts
from taut_service.watch import ClientDisconnectedError, RequestWatch

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
}
_OPEN_PATHS = ("/health/", "/metrics", "/docs", "/openapi.json")


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """What the front needs to know of the configuration."""

    models: Mapping[str, ModelLimits]
    limits: Limits
    timeouts: Timeouts


class Front:
    """The outermost ASGI callable.

    Args:
        api: the FastAPI application for every other path and for the lifespan.
        routes: path → route.
        gateway: answers checked requests.
        settings: models and limits.
        keys: who may call.
        drain: whether the door is open.
        metrics: where requests are counted.
        access_log: where they are written down.
    """

    def __init__(
        self,
        api: ASGIApp,
        routes: Mapping[str, Route],
        gateway: Gateway,
        settings: FrontSettings,
        keys: ApiKeys,
        drain: Drain,
        metrics: Metrics,
        access_log: AccessLog,
    ) -> None:
        self._api = api
        self._routes = routes
        self._gateway = gateway
        self._settings = settings
        self._keys = keys
        self.drain = drain
        self._metrics = metrics
        self._log = access_log
        self._ids = RequestIds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it to FastAPI."""
        if scope["type"] != "http":
            await self._api(scope, receive, send)
            return
        route = self._routes.get(scope["path"])
        if route is None:
            await self._pass_to_api(scope, receive, send)
            return
        headers = RequestHeaders(scope["headers"], self._ids)
        metrics = self._metrics.route(UNKNOWN_MODEL, route.name)
        call = Call(route, headers.request_id, metrics)
        watch = RequestWatch(receive, self._settings.timeouts.total_s)
        self.drain.enter(watch)
        try:
            async with watch:
                await self._answer(call, scope, headers, receive, send, watch)
        except ClientDisconnectedError:
            call.status = CLIENT_CLOSED
        except GatewayError as error:
            await self._answer_error(call, error, headers, send)
        except CutShortError:
            # Returning without the end of the body makes the server close the client's connection.
            call.status = 502
        finally:
            self.drain.leave(watch)
            self._account(call)

    async def _answer(
        self,
        call: Call,
        scope: Scope,
        headers: RequestHeaders,
        receive: Receive,
        send: Send,
        watch: RequestWatch,
    ) -> None:
        if scope["method"] != "POST":
            raise MethodNotAllowedError(scope["method"], "POST")
        self.drain.check_open()
        headers.check_framing()
        call.caller = self._keys.caller_of(headers.authorization)
        if self._keys.required:
            headers.hide_authorization()
        settings = self._settings
        body = await read_body(
            receive,
            headers.content_length,
            settings.limits.max_body_bytes,
            watch.limit(settings.timeouts.idle_s),
        )
        watch.listen()
        route = call.route
        document = parse_body(body)
        call.model = model_of(document, settings.models)
        call.metrics = self._metrics.route(call.model, route.name)
        require(document, *route.required)
        check_fields(document, route.fields, settings.models[call.model])
        query = scope["query_string"]
        path = route.path.encode() + (b"?" + query if query else b"")
        head = request_head(path, headers, len(body))
        await self._gateway.answer(call, head, body, send)

    async def _answer_error(
        self, call: Call, error: GatewayError, headers: RequestHeaders, send: Send
    ) -> None:
        if not call.worker:
            self._metrics.rejected[_REASON_OF_CODE.get(error.code, "invalid")].inc()
        if call.status and not call.streaming:
            return  # part of a document is out: the server closes the connection
        # A client that does not read must not hold the request open: without its end, the server
        # closes it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                if call.streaming:
                    call.status = error.status
                    await send({"type": "http.response.body", "body": error_event(error)})
                else:
                    call.status = error.status
                    close = headers.expects_continue or self.drain.draining
                    await send_error(send, error, headers.request_id, close=close)

    def _account(self, call: Call) -> None:
        seconds = time.perf_counter() - call.started
        if call.status in (0, CLIENT_CLOSED):
            call.metrics.abandoned()
        else:
            call.metrics.finished(call.status, seconds, call.usage)
        if self._log.enabled:
            usage = call.usage
            self._log.write(
                {
                    "time": round(time.time(), 3),
                    "id": call.request_id.decode(),
                    "route": call.route.name,
                    "model": call.model or None,
                    "worker": call.worker or None,
                    "status": call.status or CLIENT_CLOSED,
                    "seconds": round(seconds, 6),
                    "stream": call.streaming,
                    "tries": call.tries,
                    "caller": call.caller,
                    "prompt_tokens": usage.prompt_tokens if usage else None,
                    "completion_tokens": usage.completion_tokens if usage else None,
                }
            )

    async def _pass_to_api(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = RequestHeaders(scope["headers"], self._ids)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    (REQUEST_ID, headers.request_id),
                ]
            await send(message)

        if not scope["path"].startswith(_OPEN_PATHS):
            try:
                self._keys.caller_of(headers.authorization)
            except UnauthorizedError as error:
                self._metrics.rejected["unauthorized"].inc()
                await send_error(send, error, headers.request_id, close=headers.expects_continue)
                return
        await self._api(scope, receive, send_with_id)


async def send_error(send: Send, error: GatewayError, request_id: bytes, *, close: bool) -> None:
    """Send an error as a whole response.

    Args:
        send: the ASGI callable.
        error: what to say.
        request_id: for the header.
        close: ask for the connection to be closed, for a client whose body will not be read.
    """
    body = error.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (REQUEST_ID, request_id),
        *error.headers(),
    ]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
