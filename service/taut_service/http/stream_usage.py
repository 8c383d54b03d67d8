"""Has a worker tell the usage at the end of every stream, whether or not the client wants it.

vLLM counts the tokens of a streamed answer in one more event, if ``stream_options`` ask for it
(OpenAI API reference, ``stream_options.include_usage``). Without it nothing of a stream could be
charged but a guess. So the wish is put into the request's bytes, and the event is taken out of the
answer again. A client that does not ask for usage gets none in the other events either:
``continuous_usage_stats`` means nothing without ``include_usage``, and would now.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from taut_service.admit.lax import as_bool
from taut_service.http.splice import ESCAPED_ASCII, Edit, members

_KEY = b'"stream_options"'
_INCLUDE, _CONTINUOUS = "include_usage", "continuous_usage_stats"


def usage_edits(body: bytes, document: dict[str, Any]) -> tuple[Edit, ...]:
    """Return what makes a worker tell the usage.

    Args:
        body: JSON, an object that is not empty.
        document: what it holds.

    Returns:
        Nothing if the client asks for it itself, or sends options that the worker will refuse.
    """
    options = document.get("stream_options")
    if options is not None and not isinstance(options, dict):
        return ()
    if options and options.get(_INCLUDE) is not None and as_bool(options[_INCLUDE]) is not False:
        return ()
    if _KEY not in body and ESCAPED_ASCII not in body:
        return (_insert(body),)
    return tuple(_edits(body.decode("latin-1"))) or (_insert(body),)


def _insert(body: bytes) -> Edit:
    at = body.index(b"{") + 1
    return Edit(at, at, b'"stream_options":{"include_usage":true},')


def _edits(text: str) -> Iterator[Edit]:
    for key, start, end in members(text):
        if key != "stream_options":
            continue
        if text[start] != "{":
            yield Edit(start, end, b'{"include_usage":true}')
            continue
        inner = list(members(text, start))
        if not any(name == _INCLUDE for name, _, _ in inner):
            put_in = b'"include_usage":true,' if inner else b'"include_usage":true'
            yield Edit(start + 1, start + 1, put_in)
        for name, begin, after in inner:
            if name == _INCLUDE:
                yield Edit(begin, after, b"true")
            elif name == _CONTINUOUS:
                yield Edit(begin, after, b"false")
