"""Says what is wrong with a request that a gateway sent to a worker.

The strictest reader wins: llhttp through httptools for the framing, RFC 9110/9112 for what two
servers might read differently, ``json`` over strict UTF-8 for the body.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

import httptools

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_BAD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_ONCE = (b"host", b"content-length", b"content-type")
_NEVER = (b"transfer-encoding", b"te", b"trailer", b"upgrade", b"keep-alive", b"proxy-connection")


class _Reader:
    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_message_complete(self) -> None:
        self.complete = True


def what_is_wrong(head: bytes, body: bytes) -> str | None:
    """Return the first fault of a request, None if there is none.

    Args:
        head: request line and headers with the empty line.
        body: as long as ``Content-Length`` said.
    """
    reader = _Reader()
    try:
        httptools.HttpRequestParser(reader).feed_data(head + body)
    except httptools.HttpParserError as problem:
        return f"llhttp: {problem}: {head[:200]!r}"
    if not reader.complete:
        return f"the body is shorter than announced: {head[:200]!r}"
    return _framing(reader.headers) or _content(body)


def _framing(headers: list[tuple[bytes, bytes]]) -> str | None:
    names = [name for name, _ in headers]
    for name, value in headers:
        if _TOKEN.fullmatch(name) is None or _BAD_VALUE.search(value):
            return f"header {name!r}: {value!r} has characters that no header may have"
    for name in _ONCE:
        if names.count(name) != 1:
            return f"{name.decode()} appears {names.count(name)} times"
    for name in _NEVER:
        if name in names:
            return f"{name.decode()} is hop-by-hop and was passed on"
    return None


def _content(body: bytes) -> str | None:
    try:
        document = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        json.dumps(document, ensure_ascii=False).encode("utf-8")  # lone surrogates fail here
    except (ValueError, RecursionError) as problem:
        return f"the body is not strict JSON ({problem}): {body[:200]!r}"
    if not isinstance(document, dict) or not isinstance(document.get("model"), str):
        return f"the body is not an object with a model: {body[:200]!r}"
    return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
