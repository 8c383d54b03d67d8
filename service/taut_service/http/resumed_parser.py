"""Goes on with a request whose client offers another protocol; it is not taken up.

Such an offer (``Upgrade``, RFC 9110 §7.8) changes nothing of the request, which has its body like
any other: that is how Java's client begins with every server it does not know. httptools takes
what follows the head for the other protocol, and tells of a message without a body. Read on like
that, the body would be the next request.
"""

from __future__ import annotations

from collections.abc import Iterable

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from taut_service.http.cycle import Cycle


class _BeyondHead:
    """Passes on what a parser tells, but for its first head."""

    def __init__(self, told: HttpToolsProtocol) -> None:
        self._told = told
        self._in_first_head = True
        self.on_body = told.on_body
        self.on_message_complete = told.on_message_complete

    def on_message_begin(self) -> None:
        if not self._in_first_head:
            self._told.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._in_first_head:
            self._told.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_first_head:
            self._told.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._in_first_head:
            self._in_first_head = False
        else:
            self._told.on_headers_complete()


def parser_of_body(told: HttpToolsProtocol, cycle: Cycle) -> httptools.HttpRequestParser | None:
    """Take back that a request has ended; return a parser for its body and what follows.

    Args:
        told: of both.
        cycle: of a request whose head a parser took, which has one length at most.

    Returns:
        None if there is no body, or one that means nothing (RFC 9110 §9.3.6).
    """
    framing = None if cycle.scope["method"] == "CONNECT" else _framing(cycle.scope["headers"])
    if framing is None:
        return None
    cycle.more_body = True
    cycle.message_event.clear()
    parser = httptools.HttpRequestParser(_BeyondHead(told))
    parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)
    return parser


def _framing(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    for name, value in headers:
        if name == b"transfer-encoding" or (name == b"content-length" and int(value)):
            return b"%b: %b\r\n" % (name, value)
    return None
