"""Bounds on what a message costs beside its body: head, trailers, chunk sizes, chunk extensions.

Used for both directions, requests of clients and answers of workers. llhttp has no such bounds: it
reports trailers like headers, one after another for as long as they come, and reads a chunk
extension of any length. A peer may send 64 KiB of each kind and, for honest small chunks, 16 bytes
more a piece of body. What arrives in one read (256 KiB at most) is judged after it.

Time is bounded, too: :attr:`Framing.dry` counts reads in a row that brought no body.
"""

from __future__ import annotations

from typing import Final

from taut_service.errors import Headers

MAX_HEAD_BYTES: Final = 64 * 1024
"""Of a head, and of everything beside the body behind it."""
MAX_FIELDS: Final = 256
"""Headers of a head."""
TOO_MANY_FIELDS = f"the head has more than {MAX_FIELDS} headers"
MAX_TRAILERS: Final = 64
BYTES_A_READ: Final = 256
"""Not worth counting beside some body: an honest stream's reads."""
BYTES_A_PIECE: Final = 16
"""Allowed for each piece of body: a chunk's size, two line ends and a short extension."""
FRAMING_TIMEOUT_S = 30.0
"""For a head, or for what follows a body, to arrive."""


class Framing:
    """Counts for one connection; told of a parser's events in their order.

    Its owner sets the public fields itself where a call would cost a whole request more than that.
    """

    __slots__ = ("body", "dry", "in_head", "open", "outside", "pieces", "size")

    def __init__(self) -> None:
        self.size = 0
        """Bytes of the current read; set before it is parsed, 0 from the end of a message on."""
        self.open = False
        """Whether a message has begun and not ended."""
        self.in_head = False
        self.dry = 0
        """Reads in a row without body in the open message, its first included."""
        self.body = 0
        """Bytes of body in the current read."""
        self.pieces = 0
        """Pieces of body in the open message."""
        self.outside = 0
        """Bytes beside the body of the open message, in reads after its first."""

    def head_problem(self, headers: Headers, target: bytes = b"") -> str | None:
        """End a head that is long, or came in several reads.

        Args:
            headers: all of it.
            target: of a request.

        Returns:
            What is wrong with it, None if it is within its bounds.
        """
        self.in_head = False
        if len(headers) > MAX_FIELDS:
            return TOO_MANY_FIELDS
        size = len(target) + sum(len(name) + len(value) + 4 for name, value in headers)
        if size > MAX_HEAD_BYTES:
            return f"the head is larger than {MAX_HEAD_BYTES} bytes"
        self.dry = self.outside = self.size = 0
        return None

    def read_problem(self) -> str | None:
        """Judge a message that is still open after a read.

        Returns:
            What is wrong with it, None if it is within its bounds.
        """
        if self.body:
            self.dry = 0
        else:
            self.dry += 1
        self.outside += max(0, self.size - self.body)
        self.body = 0
        if self.outside <= MAX_HEAD_BYTES:
            return None
        if self.in_head:
            return f"the head is larger than {MAX_HEAD_BYTES} bytes"
        if self.outside <= MAX_HEAD_BYTES + BYTES_A_PIECE * self.pieces:
            return None
        return f"more than {MAX_HEAD_BYTES} bytes beside the body (chunk extensions, trailers)"
