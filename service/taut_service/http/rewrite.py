"""What is changed in a worker's answer: its model's name, and a stream's usage nobody asked for.

A client compares ``model`` with what it asked for, and must not learn which variant answered from
a name that only workers know. So the value is replaced in the bytes, as in requests
(:mod:`taut_service.http.splice`). An answer is not parsed for that: a completion's event holds the
name once, always written alike, and it is read once a stream; only the few events and documents in
which something else could have that name are walked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from taut_service.http.splice import ESCAPED_ASCII, KEY, NAME, Edit, members, with_edits

USAGE: Final = re.compile(rb'"usage"\s*:\s*\{')
_NO_CHOICES: Final = re.compile(rb'"choices"\s*:\s*\[\s*\]')
# Atomic: a CRLF is one line end, never a CR and an LF.
BLANK_LINE: Final = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")


class Rewrite:
    """What becomes of one answer.

    Args:
        model: the name to show, as JSON.
        hide_usage: take out the event that the client did not ask for.
        within: the member of an event's object that holds ``model``; ``""`` for the object itself.
    """

    __slots__ = ("hide_usage", "model", "within")

    def __init__(self, model: bytes, hide_usage: bool, within: str) -> None:
        self.model = model
        self.hide_usage = hide_usage
        self.within = within

    def document(self, body: bytes) -> bytes:
        """Return a whole document with the right name, or the beginning of one."""
        if body.count(KEY) != 1 or ESCAPED_ASCII in body:
            return _walked(body, 0, (), self.model) if KEY in body else body
        found = NAME.match(body, body.find(KEY))
        if found is None or found[1] == self.model:
            return body
        return with_edits(body, (Edit(*found.span(1), self.model),))


@lru_cache(maxsize=4096)
def rewrite_for(name: str, *, hide_usage: bool, within: str) -> Rewrite:
    """Return what becomes of an answer.

    Args:
        name: that the client asked for; one of the configuration's, so that they are few.
        hide_usage: see :class:`Rewrite`.
        within: likewise.
    """
    return Rewrite(json.dumps(name).encode(), hide_usage, within)


class StreamRewriter:
    """Changes the events of one stream.

    Args:
        rewrite: how.
    """

    __slots__ = ("_new", "_old", "_rewrite")

    def __init__(self, rewrite: Rewrite) -> None:
        self._rewrite = rewrite
        self._old: bytes | None = None
        self._new = b""

    def __call__(self, events: bytes, *, tells_usage: bool) -> bytes:
        """Return whole events as the client gets them, perhaps none.

        Args:
            events: of the worker.
            tells_usage: whether the word ``"usage"`` is in them.
        """
        rewrite = self._rewrite
        if tells_usage and rewrite.hide_usage and USAGE.search(events) is not None:
            events = b"".join(event for event in _split(events) if not _is_usage(event))
        if rewrite.within:
            return self._nested(events) if KEY in events else events
        old = self._old
        if old is None:
            if KEY not in events:
                return events
            old = self._old = self._learn(events)
        return events.replace(old, self._new) if old else events

    def _learn(self, events: bytes) -> bytes:
        """Return how this worker writes its name, ``b""`` if that is right already."""
        found = NAME.search(events)
        if found is None or found[1] == self._rewrite.model:
            return b""
        start = found.start(1) - found.start()
        self._new = found[0][:start] + self._rewrite.model
        return found[0]

    def _nested(self, events: bytes) -> bytes:
        rewrite = self._rewrite
        return b"".join(
            _walked(event, _payload(event), (rewrite.within,), rewrite.model)
            if KEY in event
            else event
            for event in _split(events)
        )


def _is_usage(event: bytes) -> bool:
    """Whether an event tells the usage and nothing else."""
    return USAGE.search(event) is not None and _NO_CHOICES.search(event) is not None


def _split(events: bytes) -> Iterator[bytes]:
    """Yield whole events with the blank lines that end them."""
    start = 0
    for match in BLANK_LINE.finditer(events):
        yield events[start : match.end()]
        start = match.end()
    if start < len(events):
        yield events[start:]


def _payload(event: bytes) -> int:
    """Return where the data of an event begins."""
    return 5 if event.startswith(b"data:") else event.find(b"\ndata:") + 6


def _walked(text: bytes, at: int, path: tuple[str, ...], model: bytes) -> bytes:
    """Return a text whose ``model`` at a path is another; as it is where there is none."""
    try:
        place = _place(text.decode("latin-1"), at, (*path, "model"))
    except (ValueError, IndexError, RecursionError):
        # The beginning of a document that is too long to be held, or no JSON.
        return text
    if place is None:
        return text
    start, end = place
    # Not ``text[slice(*place)]``: compiled, that is a TypeError.
    if text[start:end] == model:
        return text
    return with_edits(text, (Edit(start, end, model),))


def _place(text: str, at: int, path: tuple[str, ...]) -> tuple[int, int] | None:
    for key, start, end in members(text, at):
        if key == path[0]:
            if len(path) == 1:
                return start, end
            return _place(text, start, path[1:]) if text[start] == "{" else None
    return None
