"""Changes values in JSON text without writing the rest anew.

A request gets the name that its worker serves in the place of the name its client used, an answer
the other way round, a stream the wish for its usage. Nothing else changes, and a text that is right
already is passed on as the very same object. Where a quick look leaves a doubt about which value is
meant (the word ``"model"`` occurs twice, or escapes could hide it), the members of the outermost
object are walked with the parser; a member that is given more than once is changed each time, so
that no two readers can see different values. A document is never written anew: a number such as
``1e999`` would come out as something that is not JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from taut_service.http.json_body import DECODER_THAT_GIVES_WAY

NAME: Final = re.compile(rb'"model"[ \t\r\n]*:[ \t\r\n]*("(?:[^"\\]|\\.)*")')
KEY: Final = b'"model"'
ESCAPED_ASCII: Final = b"\\u00"
"""Begins every escape that could spell ``model``, or any other ASCII name."""
_SPACE: Final = re.compile(r"[ \t\r\n]*")

Places = tuple[tuple[int, int], ...]
"""Begin and end of each value of ``model``, in bytes."""


class Edit(NamedTuple):
    """Bytes ``start`` to ``end`` become ``text``; both are equal where something is put in."""

    start: int
    end: int
    text: bytes


def find_models(body: bytes) -> Places:
    """Return where the values of ``model`` are.

    Args:
        body: valid JSON, an object.
    """
    if body.count(KEY) == 1 and ESCAPED_ASCII not in body:
        found = NAME.match(body, body.find(KEY))
        if found is not None:
            return (found.span(1),)
    # Latin-1 has one character a byte, and what gives JSON its structure is ASCII.
    return tuple(
        (start, end) for key, start, end in members(body.decode("latin-1")) if key == "model"
    )


def model_edits(body: bytes, places: Places, name: str) -> tuple[Edit, ...]:
    """Return what makes a request ask for another model.

    Args:
        body: valid JSON, an object.
        places: of its models.
        name: the model to ask for.

    Returns:
        Nothing if it asks for ``name`` already.
    """
    quoted = json.dumps(name).encode()
    if all(body[start:end] == quoted for start, end in places):
        return ()
    return tuple(Edit(start, end, quoted) for start, end in places)


def name_edits(body: bytes, name: str) -> tuple[Edit, ...]:
    """Return what makes a request name a model that names none, or null.

    Args:
        body: valid JSON, an object that is not empty.
        name: of the model.
    """
    quoted = json.dumps(name).encode()
    found = members(body.decode("latin-1"))
    places = [Edit(start, end, quoted) for key, start, end in found if key == "model"]
    at = body.index(b"{") + 1
    return tuple(places) or (Edit(at, at, b'"model":%b,' % quoted),)


def with_edits(body: bytes, edits: Sequence[Edit]) -> bytes:
    """Return a text with some places changed.

    Args:
        body: any bytes.
        edits: in their order, none within another.

    Returns:
        The new text, ``body`` itself without edits.
    """
    if not edits:
        return body
    pieces: list[bytes] = []
    after = 0
    for start, end, text in edits:
        pieces += (body[after:start], text)
        after = end
    pieces.append(body[after:])
    return b"".join(pieces)


def moved(places: Places, edits: Sequence[Edit]) -> Places:
    """Return where places are after edits, those that were changed as well.

    Args:
        places: in the text before.
        edits: of :func:`with_edits`; a place is changed as a whole or not at all.
    """
    found = []
    for start, end in places:
        shift = growth = 0
        for edit in edits:
            change = len(edit.text) - (edit.end - edit.start)
            if (edit.start, edit.end) == (start, end):
                growth = change
            elif edit.end <= start:
                shift += change
        found.append((start + shift, end + shift + growth))
    return tuple(found)


def members(text: str, at: int = 0) -> Iterator[tuple[str, int, int]]:
    """Yield the name of every member of an object, and begin and end of its value.

    Args:
        text: JSON in Latin-1, or a text in which one begins.
        at: where the object begins, or space before it.

    Raises:
        ValueError: what follows is not JSON.
        IndexError: the text ends within the object.
    """
    at = _skip_space(text, _skip_space(text, at) + 1)
    while text[at] == '"':
        key, at = DECODER_THAT_GIVES_WAY.raw_decode(text, at)
        start = _skip_space(text, _skip_space(text, at) + 1)
        _, end = DECODER_THAT_GIVES_WAY.raw_decode(text, start)
        yield key, start, end
        at = _skip_space(text, end)
        if text[at] == ",":
            at = _skip_space(text, at + 1)


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match is not None else at
