"""Carries a worker's answer to the client: whole documents in one go, streams event by event.

A document is held until it is whole (up to ``HOLD_BYTES``), the head of a stream
(:mod:`taut_service.http.stream_relay`) until its first event: a worker that dies before that costs
nothing, another one can be asked. After that a stream cannot be taken back, and the failure becomes
a last event ``data: {"error": …}``. While the client is slow nothing is read, and the connection
then stops the worker (see :mod:`taut_service.worker.connection`).
"""

from __future__ import annotations

from starlette.types import Send

from taut_service.call import Call
from taut_service.errors import Headers, NotFoundError, UpstreamFailureError
from taut_service.http.answer_failures import CutShortError, broken_before
from taut_service.http.headers import response_headers
from taut_service.http.sse import read_usage
from taut_service.http.stream_relay import relay_stream
from taut_service.http.worker_refusals import refusal_of
from taut_service.worker.connection import Connection
from taut_service.worker.upstream_errors import UpstreamError

HOLD_BYTES = 1024 * 1024
"""Documents up to this size are answered whole or not at all; longer ones as they come."""


async def relay(
    call: Call, connection: Connection, worker: bytes, variant: bytes, send: Send
) -> None:
    """Pass on an answer whose head has arrived.

    Args:
        call: the request; its ``status``, ``usage`` and ``streaming`` are filled in.
        connection: to the worker.
        worker: its name, for the header.
        variant: the name of its variant, for the header.
        send: the ASGI callable.

    Raises:
        GatewayError: it should be sent, as an event if ``call.streaming``.
        NothingSentError: nothing has been sent, and the worker is lost.
        CutShortError: the beginning has been sent and the rest will not come.
    """
    if _relay_whole(call, connection, worker, variant):
        return
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
    headers = response_headers(connection.headers, call.request_id, worker, variant)
    headers += call.extra_headers
    if _is_event_stream(headers):
        await relay_stream(call, connection, headers, send)
    else:
        await _relay_document(call, connection, headers, send)


def _relay_whole(call: Call, connection: Connection, worker: bytes, variant: bytes) -> bool:
    """Pass on a good document that has arrived whole, as a small one has with its head.

    It is what :func:`relay` does with it, without a coroutine for each step.

    Returns:
        Whether it was passed on; if not, nothing has happened.
    """
    exchange = call.exchange
    if (
        exchange is None
        or connection.status != 200
        or not exchange.takes_answer
        or _is_event_stream(connection.headers)
    ):
        return False
    body = connection.take_whole()
    if body is None:
        return False
    headers = response_headers(connection.headers, call.request_id, worker, variant)
    headers += call.extra_headers
    headers, body = _finished(call, headers, body)
    exchange.respond(200, headers, body)
    call.answer.status = 200
    return True


def _is_event_stream(headers: Headers) -> bool:
    for name, value in headers:
        if name == b"content-type" and value[:17].lower() == b"text/event-stream":
            return True
    return False


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
        raise broken_before(error) from error
    body = b"".join(pieces)
    if connection.status >= 400:
        refusal = refusal_of(call.model, body)
        if refusal is not None:
            raise refusal
        body = call.route.dialect.worker_error(body, connection.status, call.request_id)
        call.answer.usage = read_usage(body)
        if call.tap is not None:
            call.tap.hear(body)
        headers = _with_length(headers, body)
    else:
        headers, body = _finished(call, headers, body)
    if call.exchange is not None and call.exchange.respond(connection.status, headers, body):
        call.answer.status = connection.status
        return
    await send({"type": "http.response.start", "status": connection.status, "headers": headers})
    call.answer.status = connection.status
    await send({"type": "http.response.body", "body": body})


def _finished(call: Call, headers: Headers, body: bytes) -> tuple[Headers, bytes]:
    """Return a whole good document, and its headers, as the client gets them; read its usage."""
    if call.rewrite is not None:
        body = call.rewrite.document(body)
    call.answer.usage = read_usage(body)
    if call.tap is not None:
        call.tap.hear(body)
    return _with_length(headers, body), body


def _with_length(headers: Headers, body: bytes) -> Headers:
    told = [item for item in headers if item[0] != b"content-length"]
    told.append((b"content-length", b"%d" % len(body)))
    return told


async def _pass_on(
    call: Call, connection: Connection, headers: Headers, held: list[bytes], send: Send
) -> None:
    data = b"".join(held)
    held.clear()
    if call.rewrite is not None:
        size = len(data)
        data = call.rewrite.document(data)
        headers = _longer(headers, len(data) - size)
    await send({"type": "http.response.start", "status": connection.status, "headers": headers})
    call.answer.status = connection.status
    tail = b""
    try:
        while data:
            # The usage object is in the last kilobytes, after the choices.
            tail = (tail + data)[-4096:]
            if call.tap is not None:
                call.tap.hear(data)
            await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await connection.read()
    except UpstreamError as error:
        raise CutShortError from error
    call.answer.usage = read_usage(tail)
    await send({"type": "http.response.body", "body": b""})


def _longer(headers: Headers, by: int) -> Headers:
    """Return headers that announce so many bytes more, where they announce any."""
    return [
        (name, b"%d" % (int(value) + by)) if name == b"content-length" else (name, value)
        for name, value in headers
    ]
