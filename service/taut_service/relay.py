"""Carries a worker's answer to the client: whole documents in one go, streams event by event.

A document is held until it is whole (up to ``HOLD_BYTES``), so that a worker that dies in the
middle becomes a clean 502. A stream cannot be taken back: there the failure becomes a last event
``data: {"error": …}``. One ``send`` per read; ``send`` waits while the client is slow, nothing is
read meanwhile, and the connection then stops the worker (see :mod:`taut_service.connection`).
"""

from __future__ import annotations

import time

from starlette.types import Send

from taut_service.call import Call
from taut_service.connection import Connection, StallError, UpstreamError
from taut_service.errors import (
    GatewayError,
    Headers,
    NotFoundError,
    UpstreamDeadlineError,
    UpstreamFailureError,
)
from taut_service.headers import response_headers
from taut_service.sse import SseReframer, read_usage

HOLD_BYTES = 1024 * 1024
"""Documents up to this size are answered whole or not at all; longer ones as they come."""


class CutShortError(Exception):
    """A long document broke off after its beginning was sent: close the client's connection."""


def error_event(error: GatewayError) -> bytes:
    """Return an error as one server-sent event."""
    return b"data: " + error.body() + b"\n\n"


async def relay(call: Call, connection: Connection, worker: bytes, send: Send) -> None:
    """Pass on an answer whose head has arrived.

    Args:
        call: the request; its ``status``, ``usage`` and ``streaming`` are filled in.
        connection: to the worker.
        worker: its name, for the header.
        send: the ASGI callable.

    Raises:
        GatewayError: nothing has been sent and this should be.
        CutShortError: the beginning has been sent and the rest will not come.
    """
    status = connection.status
    if status >= 500 or status // 100 == 3:
        # The text of a worker's failure stays inside: it may name paths, tensors and versions.
        raise UpstreamFailureError(
            f"the worker failed on this request (its status was {status})", code="worker_error"
        )
    if status == 404 and call.route.optional:
        raise NotFoundError(
            f"the worker of {call.model!r} does not offer {call.route.path}", code="not_offered"
        )
    headers = response_headers(connection.headers, call.request_id, worker)
    if _is_event_stream(headers):
        await _relay_stream(call, connection, headers, send)
    else:
        await _relay_document(call, connection, headers, send)


def _is_event_stream(headers: Headers) -> bool:
    return any(
        name == b"content-type" and value[:17].lower() == b"text/event-stream"
        for name, value in headers
    )


def failure_of(error: UpstreamError) -> UpstreamFailureError:
    """Return what a client is told about a broken or silent worker."""
    if isinstance(error, StallError):
        return UpstreamDeadlineError("the worker did not answer in time", code="worker_timeout")
    return UpstreamFailureError(
        "the worker's answer broke off; send the request again", code="worker_lost"
    )


async def _relay_document(call: Call, connection: Connection, headers: Headers, send: Send) -> None:
    pieces: list[bytes] = []
    size = 0
    try:
        while data := await connection.read():
            pieces.append(data)
            size += len(data)
            if size > HOLD_BYTES:
                await _pass_on(call, connection, headers, pieces, send)
                return
    except UpstreamError as error:
        raise failure_of(error) from error
    body = b"".join(pieces)
    call.usage = read_usage(body)
    headers = [item for item in headers if item[0] != b"content-length"]
    headers.append((b"content-length", b"%d" % size))
    await send({"type": "http.response.start", "status": connection.status, "headers": headers})
    call.status = connection.status
    await send({"type": "http.response.body", "body": body})


async def _pass_on(
    call: Call, connection: Connection, headers: Headers, held: list[bytes], send: Send
) -> None:
    await send({"type": "http.response.start", "status": connection.status, "headers": headers})
    call.status = connection.status
    data = b"".join(held)
    held.clear()
    tail = b""
    try:
        while data:
            # The usage object is in the last kilobytes, after the choices.
            tail = (tail + data)[-4096:]
            await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await connection.read()
    except UpstreamError as error:
        raise CutShortError from error
    call.usage = read_usage(tail)
    await send({"type": "http.response.body", "body": b""})


async def _relay_stream(call: Call, connection: Connection, headers: Headers, send: Send) -> None:
    reframer = SseReframer()
    await send({"type": "http.response.start", "status": connection.status, "headers": headers})
    # From here on an error can only be an event. Not before: ``send`` may be interrupted.
    call.status = connection.status
    call.streaming = True
    last = 0.0
    try:
        while data := await connection.read():
            before = reframer.events
            events = reframer.feed(data)
            if not events:
                continue
            new = reframer.events - before
            if new:
                now = time.perf_counter()
                if last:
                    call.metrics.next_tokens(now - last, new)
                else:
                    call.metrics.first_token(now - call.started)
                last = now
            await send({"type": "http.response.body", "body": events, "more_body": True})
    except UpstreamError as error:
        raise failure_of(error) from error
    finally:
        call.usage = reframer.usage
    await send({"type": "http.response.body", "body": reframer.flush()})
