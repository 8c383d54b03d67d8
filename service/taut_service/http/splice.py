"""Puts the name a worker serves in the place of the name a client used; nothing else changes.

A body that already has the right name is passed on as the very same object. Otherwise the value is
replaced in the bytes. Where a quick look leaves a doubt about which value it is (the word
``"model"`` occurs twice, or escapes could hide it), the members of the outermost object are walked
with the parser; a ``model`` that is given more than once is replaced each time, so that no two
readers can see different models. The document is never written anew: a number such as ``1e999``
would come out as something that is not JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from taut_service.http.json_body import DECODER_THAT_GIVES_WAY

_NAME = re.compile(rb'"model"[ \t\r\n]*:[ \t\r\n]*("(?:[^"\\]|\\.)*")')
_KEY = b'"model"'
_ESCAPED_ASCII = b"\\u00"
"""Begins every escape that could spell ``model``."""
_SPACE = re.compile(r"[ \t\r\n]*")

Places = tuple[tuple[int, int], ...]
"""Begin and end of each value of ``model``, in bytes."""


def find_models(body: bytes) -> Places:
    """Return where the values of ``model`` are.

    Args:
        body: valid JSON, an object with a ``model``.
    """
    if body.count(_KEY) == 1 and _ESCAPED_ASCII not in body:
        found = _NAME.search(body)
        if found is not None:
            return (found.span(1),)
    # Latin-1 has one character a byte, and what gives JSON its structure is ASCII.
    return tuple(_walk(body.decode("latin-1")))


def with_model(body: bytes, places: Places, name: str) -> tuple[bytes, Places]:
    """Return a request body that asks for another model.

    Args:
        body: valid JSON, an object.
        places: of its models.
        name: the model to ask for.

    Returns:
        The body, which is ``body`` itself if it asks for ``name`` already, and its places.
    """
    quoted = json.dumps(name).encode()
    if all(body[start:end] == quoted for start, end in places):
        return body, places
    pieces: list[bytes] = []
    moved: list[tuple[int, int]] = []
    after = size = 0
    for start, end in places:
        size += start - after
        moved.append((size, size + len(quoted)))
        size += len(quoted)
        pieces += (body[after:start], quoted)
        after = end
    pieces.append(body[after:])
    return b"".join(pieces), tuple(moved)


def _walk(text: str) -> Iterator[tuple[int, int]]:
    """Yield begin and end of every ``model`` of the outermost object."""
    at = _skip_space(text, _skip_space(text, 0) + 1)
    while text[at] == '"':
        key, at = DECODER_THAT_GIVES_WAY.raw_decode(text, at)
        start = _skip_space(text, _skip_space(text, at) + 1)
        _, end = DECODER_THAT_GIVES_WAY.raw_decode(text, start)
        if key == "model":
            yield start, end
        at = _skip_space(text, end)
        if text[at] == ",":
            at = _skip_space(text, at + 1)


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match is not None else at
