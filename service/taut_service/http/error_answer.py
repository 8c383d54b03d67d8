"""An error as a whole response, in the dialect that the client speaks."""

from __future__ import annotations

from starlette.types import Send

from taut_service.errors import GatewayError, RequestError
from taut_service.http.client_exchange import ClientExchange
from taut_service.http.headers import REQUEST_ID


def invalid_http(problem: str) -> bytes:
    """Return the whole response to what is not HTTP; the connection ends with it.

    Args:
        problem: what is wrong.
    """
    body = RequestError(problem, code="invalid_http").body()
    head = (
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


async def send_error(
    send: Send,
    error: GatewayError,
    request_id: bytes,
    *,
    close: bool,
    body: bytes | None = None,
    exchange: ClientExchange | None = None,
) -> None:
    """Send an error as a whole response.

    Args:
        send: the ASGI callable.
        error: what to say.
        request_id: for the header.
        close: ask for the connection to be closed, for a client whose body will not be read.
        body: the error in another shape than OpenAI's.
        exchange: the cheaper way, where there is one.
    """
    body = error.body() if body is None else body
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (REQUEST_ID, request_id),
        *error.headers(),
    ]
    if close:
        headers.append((b"connection", b"close"))
    elif exchange is not None and exchange.respond(error.status, headers, body):
        return
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
