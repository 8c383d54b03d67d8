"""Bounds the request bodies of an application that reads them before it looks at anything else.

FastAPI takes a whole body into memory before it runs a dependency, one that checks the key
included. So the body is read here, within a size and a time, and handed on in one piece.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from taut_service.errors import (
    BodyTooLargeError,
    ContentCodingError,
    GatewayError,
    RequestTimeoutError,
)
from taut_service.http.error_answer import send_error
from taut_service.http.headers import RequestHeaders, RequestIds

MAX_BYTES = 256 * 1024
ARRIVAL_S = 10.0
"""For a whole body to arrive."""


class SmallBodies:
    """An ASGI callable around another one.

    Args:
        app: gets requests with their whole bodies.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._ids = RequestIds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse its body with 408, 413 or 415."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = RequestHeaders(scope["headers"], self._ids)
        try:
            first = await _whole(headers, receive)
        except GatewayError as error:
            await send_error(send, error, headers.request_id, close=headers.expects_continue)
            return
        waiting = [first]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, replay, send)


async def _whole(headers: RequestHeaders, receive: Receive) -> Message:
    """Return the message with the body, or that the client left."""
    if headers.content_coding is not None:
        raise ContentCodingError(headers.content_coding.decode("latin-1"), offered=())
    if (headers.content_length or 0) > MAX_BYTES:
        raise BodyTooLargeError(MAX_BYTES)
    pieces: list[bytes] = []
    size = 0
    more = True
    try:
        async with asyncio.timeout(ARRIVAL_S):
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    return message
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                if size > MAX_BYTES:
                    raise BodyTooLargeError(MAX_BYTES)
                more = message.get("more_body", False)
    except TimeoutError as error:
        text = f"the request body did not arrive within {ARRIVAL_S:g} s"
        raise RequestTimeoutError(text, code="body_timeout") from error
    return {"type": "http.request", "body": b"".join(pieces), "more_body": False}
