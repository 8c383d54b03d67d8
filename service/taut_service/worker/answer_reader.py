"""What a connection to a worker keeps of the answer that is coming: told by the parser, in order.

Framing is httptools' (llhttp) work, within the bounds of :mod:`taut_service.http.framing`; what
either refuses is a :class:`ProtocolError`.
"""

from __future__ import annotations

import httptools

from taut_service.errors import Headers
from taut_service.http.framing import (
    MAX_FIELDS,
    MAX_HEAD_BYTES,
    MAX_TRAILERS,
    TOO_MANY_FIELDS,
    Framing,
)
from taut_service.worker.upstream_errors import ProtocolError


class AnswerReader:
    """One answer after another: status, headers, and the pieces of the body nobody took yet."""

    __slots__ = (
        "_buffered", "_complete", "_framing", "_head_done", "_keep_alive", "_parser", "_pieces",
        "_trailers", "_until_close", "got_bytes", "headers", "received", "status",
    )  # fmt: skip

    def __init__(self) -> None:
        self._framing = Framing()
        self._parser = httptools.HttpResponseParser(self)
        self._keep_alive = False
        self._forget_answer()

    def _forget_answer(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.got_bytes = False
        self.received = 0
        self._head_done = False
        self._trailers = 0
        self._complete = False
        self._until_close = False
        self._pieces: list[bytes] = []
        self._buffered = 0

    def _take_pieces(self) -> bytes:
        """Return what is held of the body; it is held no more."""
        pieces, self._pieces = self._pieces, []
        self._buffered = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def on_message_begin(self) -> None:
        """Refuse a second answer to one request."""
        if self._complete:
            raise ProtocolError("more than one response")
        framing = self._framing
        framing.open = framing.in_head = True
        framing.dry = framing.outside = framing.body = framing.pieces = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header, its name in lower case; drop a trailer, refuse too many."""
        if not self._head_done:
            self.headers.append((name.lower(), value))
            return
        self._trailers += 1
        if self._trailers > MAX_TRAILERS:
            raise ProtocolError(f"the message has more than {MAX_TRAILERS} trailers")

    def on_headers_complete(self) -> None:
        """Take the status; forget an interim (1xx) head."""
        framing = self._framing
        if framing.outside or not 0 < framing.size <= MAX_HEAD_BYTES:
            problem = framing.head_problem(self.headers)
            if problem is not None:
                raise ProtocolError(problem)
        elif len(self.headers) > MAX_FIELDS:
            raise ProtocolError(TOO_MANY_FIELDS)
        framing.in_head = False
        framing.size = 0
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers.clear()
            return
        self._head_done = True
        self._until_close = not self._is_framed() and self.status not in (204, 304)

    def _is_framed(self) -> bool:
        for name, _ in self.headers:
            if name == b"content-length" or name == b"transfer-encoding":
                return True
        return False

    def on_body(self, piece: bytes) -> None:
        """Hold a piece for the consumer."""
        self._pieces.append(piece)
        self._buffered += len(piece)

    def on_message_complete(self) -> None:
        """Note the end and whether the connection stays."""
        framing = self._framing
        framing.open = framing.in_head = False
        framing.size = 0
        if self._head_done:
            self._complete = True
            self._keep_alive = bool(self._parser.should_keep_alive())
