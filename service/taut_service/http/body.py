"""Reads a request body within a limit."""

from __future__ import annotations

from starlette.types import Receive

from taut_service.errors import BodyTooLargeError
from taut_service.http.request_watch import ClientDisconnectedError, SilenceLimit


async def read_body(
    receive: Receive, content_length: int | None, max_bytes: int, silence: SilenceLimit
) -> bytes:
    """Read the whole body.

    A body that announces more than the limit is refused before any of it is read; one that does
    not announce its length, as soon as it passes the limit. What follows is thrown away by the
    server, a buffer at a time, so the client can finish sending and read the answer.

    Args:
        receive: the ASGI callable.
        content_length: announced bytes, None if not announced.
        max_bytes: the limit.
        silence: ends the request when no piece comes for too long.

    Returns:
        The body.

    Raises:
        BodyTooLargeError: more than ``max_bytes``.
        ClientDisconnectedError: the client left.
    """
    if content_length is not None and content_length > max_bytes:
        raise BodyTooLargeError(max_bytes)
    pieces: list[bytes] = []
    size = 0
    more = True
    try:
        while more:
            silence.restart()
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnectedError
            data = message.get("body", b"")
            size += len(data)
            if size > max_bytes:
                raise BodyTooLargeError(max_bytes)
            pieces.append(data)
            more = message.get("more_body", False)
    finally:
        silence.stop()
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
