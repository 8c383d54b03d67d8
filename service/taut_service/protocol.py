"""uvicorn's HTTP protocol with two bounds it lacks: size of a request head, time to send it.

Without them a client can keep a connection for ever by sending nothing, or fill the memory with
one endless header. It also refuses what two servers could read differently (RFC 9112 §2.3, §3.2,
§6.1): a missing or second ``Host``, a version other than 1.0 and 1.1, a transfer coding other than
``chunked``. What is not HTTP at all gets the same error shape as everything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import cast

from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from taut_service.client_exchange import SCOPE_KEY, ClientExchange
from taut_service.errors import RequestError

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0


def why_ambiguous(version: str, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Say why a request could mean something else to another server.

    Args:
        version: of HTTP, such as ``1.1``.
        headers: names in lower case.

    Returns:
        A sentence, or None for a request that is clear.
    """
    hosts = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            return "the only transfer coding taken here is chunked"
    if hosts == 1 and version == "1.1":
        return None
    if version not in ("1.0", "1.1"):
        return "the request is neither HTTP/1.1 nor HTTP/1.0"
    if hosts > 1:
        return "the request has more than one Host"
    return None if version == "1.0" else "the request has no Host"


class BoundedHttpProtocol(HttpToolsProtocol):
    """One client connection. Costs nothing while heads arrive whole, in one read."""

    _in_head = True
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _exchange: ClientExchange | None = None
    _refusal: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        """Start the application on a request whose turn it is, pipelined ones included."""
        self._exchange = exchange = ClientExchange(cycle)
        cast("dict[str, object]", cycle.scope)[SCOPE_KEY] = exchange
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def on_message_begin(self) -> None:
        """Begin a head."""
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """End a head."""
        self._in_head = False
        self._stop_head_timer()
        self._refusal = why_ambiguous(self.parser.get_http_version(), self.headers)
        if self._refusal is not None:
            # The parser turns it into its own error, which ends in send_400_response.
            raise ValueError(self._refusal)
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Parse; bound a head that is still incomplete after it."""
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"the request head is larger than {MAX_HEAD_BYTES} bytes")
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_head_timer()
        super().connection_lost(exc)
        if self._exchange is not None:
            self._exchange.client_left()

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed and close."""
        body = RequestError(self._refusal or msg, code="invalid_http").body()
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        self.transport.close()
