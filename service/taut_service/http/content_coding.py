"""Decodes a request body's ``Content-Encoding``: gzip, deflate and zstd, within bounds.

Four kilobytes may decode to four megabytes, so nothing is decoded at once: a decoder gives pieces
of :data:`PIECE_BYTES`, and both size and ratio are judged after each of them. A zstd frame also
says how much memory it wants for its window; more than a content coding may have is refused.

Sources: RFC 9110 §8.4.1 (``deflate`` is the zlib format; some clients send it without), RFC 1950
to 1952, RFC 8878, RFC 9659 §3 (the window of zstd as a content coding is 8 MiB at most).
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from taut_service.errors import (
    BodyExpandsError,
    BodyTooLargeError,
    ContentCodingError,
    RequestError,
)

if TYPE_CHECKING:
    from taut_service.http.headers import RequestHeaders

PIECE_BYTES = 64 * 1024
"""Decoded in one go: a fraction of a millisecond."""
MAX_RATIO = 100
"""Decoded bytes for each byte received. JSON compresses to a tenth or so of its size."""
RATIO_FREE_BYTES = 1024 * 1024
"""Decoded bytes up to which the ratio does not matter: a test prompt may be one word, repeated."""
_ZSTD_WINDOW_LOG = 23
_GZIP_WINDOW, _ZLIB_WINDOW, _RAW_WINDOW = 31, 15, -15
_DEFLATE_METHOD = 8


class _Decompressor(Protocol):
    """What is common to a member of each format."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def hungry(self) -> bool:
        """Whether more input is needed before there is more output."""

    def decompress(self, data: bytes) -> bytes:
        """Take input; return at most ``PIECE_BYTES`` of output."""


class _Zlib:
    """A gzip, zlib or raw deflate stream.

    Args:
        window: zlib's ``wbits``; None for zlib or raw, as the first byte says.
    """

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._stream = None if window is None else zlib.decompressobj(window)
        self._waiting = b""
        self.hungry = True

    @property
    def eof(self) -> bool:
        return self._stream is not None and self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return b"" if self._stream is None else self._stream.unused_data

    def decompress(self, data: bytes) -> bytes:
        if self._stream is None:
            if not data:
                return b""
            zlib_format = data[0] & 0x0F == _DEFLATE_METHOD
            self._stream = zlib.decompressobj(_ZLIB_WINDOW if zlib_format else _RAW_WINDOW)
        piece = self._stream.decompress(self._waiting + data, PIECE_BYTES)
        self._waiting = self._stream.unconsumed_tail
        # A full piece may have left output within zlib even where no input is left.
        self.hungry = not self._waiting and len(piece) < PIECE_BYTES
        return piece


class _Zstd:
    """A zstd frame."""

    def __init__(self) -> None:
        # Imported for the first such body: few clients send one.
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd

        bound = {int(zstd.DecompressionParameter.window_log_max): _ZSTD_WINDOW_LOG}
        self._frame = zstd.ZstdDecompressor(options=bound)
        self.broken: type[Exception] = zstd.ZstdError

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data

    @property
    def hungry(self) -> bool:
        return self._frame.needs_input

    def decompress(self, data: bytes) -> bytes:
        return self._frame.decompress(data, PIECE_BYTES)


_DECOMPRESSORS: Mapping[bytes, Callable[[], _Decompressor]] = {
    b"gzip": lambda: _Zlib(_GZIP_WINDOW),
    b"x-gzip": lambda: _Zlib(_GZIP_WINDOW),
    b"deflate": lambda: _Zlib(None),
    b"zstd": _Zstd,
}


class BodyDecoder:
    """Decodes one body.

    Args:
        coding: value of ``Content-Encoding``, in lower case.
        max_bytes: most bytes of the decoded body.

    Raises:
        ContentCodingError: a coding that is not offered, or several.
    """

    def __init__(self, coding: bytes, max_bytes: int) -> None:
        make = _DECOMPRESSORS.get(coding)
        if make is None:
            raise ContentCodingError(coding.decode("latin-1"))
        self._name = coding.decode()
        self._decompressor = make()
        self._broken = (zlib.error, getattr(self._decompressor, "broken", zlib.error))
        self._max_bytes = max_bytes
        self._taken = self._given = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take a piece of the encoded body.

        Args:
            data: the bytes; none are allowed.

        Yields:
            Decoded pieces.

        Raises:
            BodyTooLargeError: the decoded body is larger than ``max_bytes``.
            BodyExpandsError: it is out of proportion to what was received.
            RequestError: the bytes are not of this coding.
        """
        self._taken += len(data)
        while data or not self._decompressor.hungry:
            if self._decompressor.eof:
                if data:
                    raise self._wrong("goes on behind its end")
                return
            try:
                piece = self._decompressor.decompress(data)
            except self._broken as error:
                raise self._wrong("is damaged or of another format") from error
            data = self._decompressor.unused_data
            if piece:
                self._count(len(piece))
                yield piece

    def finish(self) -> None:
        """Insist that the body is whole.

        Raises:
            RequestError: it ends within its encoding.
        """
        if not self._decompressor.eof:
            raise self._wrong("is not complete")

    def _count(self, size: int) -> None:
        self._given += size
        if self._given > self._max_bytes:
            raise BodyTooLargeError(self._max_bytes)
        if self._given > max(RATIO_FREE_BYTES, MAX_RATIO * self._taken):
            raise BodyExpandsError(self._name, MAX_RATIO)

    def _wrong(self, what: str) -> RequestError:
        text = f"the request body {what} (Content-Encoding: {self._name})"
        return RequestError(text, code="invalid_encoding")


def decoder_for(headers: RequestHeaders, max_bytes: int) -> BodyDecoder | None:
    """Return what decodes a request's body, None for one that is not encoded.

    Args:
        headers: of the request.
        max_bytes: most bytes of the decoded body.

    Raises:
        ContentCodingError: a coding that is not offered, or several.
    """
    coding = headers.content_coding
    return None if coding is None else BodyDecoder(coding, max_bytes)
