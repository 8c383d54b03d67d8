"""An error as a whole response, in the dialect that the client speaks."""

from __future__ import annotations

from starlette.types import Send

from taut_service.errors import GatewayError
from taut_service.http.client_exchange import ClientExchange
from taut_service.http.headers import REQUEST_ID


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
