"""Server-sent events as they pass: whole events, counted, with the usage a worker reports.

The bytes forwarded are the worker's own, in order, but for what
:mod:`taut_service.http.rewrite` changes; only the cuts between them move, to the blank lines that
end events. So when a worker dies in the middle of an event, the half is dropped here
and the error event that follows is well-formed. Format: WHATWG HTML, §9.2.6; a line may end in
LF, CRLF or CR. The usage object: OpenAI API reference, ``usage``.
"""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple

from taut_service.http.rewrite import BLANK_LINE, USAGE, Rewrite, StreamRewriter

MAX_EVENT_BYTES: Final = 4 * 1024 * 1024
"""An event longer than this is passed on in pieces, so that memory stays bounded."""

MAX_KNOWN_SIZE: Final = 1024
"""Bytes of events up to which as many are taken to hold as much text as the last time."""

_DATA_LINE: Final = re.compile(rb"(?:(?<=\n)|(?<=\r)|\A)data:")
# OpenAI's completions say prompt_tokens and completion_tokens; its responses and Anthropic's
# messages say input_tokens and output_tokens.
_PROMPT_TOKENS: Final = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,12})')
_COMPLETION_TOKENS: Final = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,12})')
# What a model wrote, in the events of every dialect; whole answers repeated at the end of a stream
# stand under other names or come after their usage.
_TEXT: Final = re.compile(
    rb'"(?:content|text|delta|reasoning|reasoning_content|refusal|arguments|thinking|partial_json'
    rb')"\s*:\s*"((?:[^"\\]|\\.)*+)'
)
# Anthropic does not count these among input_tokens.
_CACHED_TOKENS: Final = re.compile(rb'"cache_(?:read|creation)_input_tokens"\s*:\s*(\d{1,12})')


class Usage(NamedTuple):
    """Tokens in and out, as the worker counted them."""

    prompt_tokens: int
    completion_tokens: int


def read_usage(data: bytes) -> Usage | None:
    """Find the last ``usage`` object in a piece of JSON text without parsing the rest.

    Within a JSON string the quotes of ``"usage"`` would be escaped, so generated text cannot be
    mistaken for it.

    Args:
        data: a whole JSON document or whole events.

    Returns:
        The counts, or None where there is no such object.
    """
    start = data.rfind(b'"usage"')
    if start < 0 or USAGE.match(data, start) is None:
        return None
    prompt = _PROMPT_TOKENS.search(data, start)
    completion = _COMPLETION_TOKENS.search(data, start)
    # An embedding has no completion: the field is then absent.
    if prompt is None:
        return None
    cached = 0
    if data.find(b'"cache_', start) >= 0:
        cached = sum(int(found) for found in _CACHED_TOKENS.findall(data, start))
    return Usage(int(prompt[1]) + cached, int(completion[1]) if completion is not None else 0)


class SseReframer:
    """Turns arbitrary cuts of a byte stream into cuts between events.

    Args:
        count_text: count the bytes of generated text as well, for a worker that reports no usage:
            one event may hold many tokens (vLLM: ``stream_interval``, speculative decoding).
        rewrite: what is changed in the events; None changes nothing.
    """

    __slots__ = (
        "_count_text",
        "_rest",
        "_rewriter",
        "_text_by_size",
        "events",
        "text_bytes",
        "usage",
        "whole",
    )

    def __init__(self, *, count_text: bool = False, rewrite: Rewrite | None = None) -> None:
        self._count_text = count_text
        self._rewriter = None if rewrite is None else StreamRewriter(rewrite)
        self._rest = b""
        self._text_by_size: dict[int, int] = {}
        self.text_bytes = 0
        self.events = 0
        self.usage: Usage | None = None
        self.whole = True
        """Whether only whole events were given out so far."""

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes.

        Args:
            data: whatever one read gave.

        Returns:
            The events up to the last blank line seen, ``b""`` while an event is unfinished.
        """
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if data.endswith(b"\n\n"):
            return self._account(data)
        end = _end_of_events(data)
        if end < len(data):
            data, self._rest = data[:end], data[end:]
            if len(self._rest) > MAX_EVENT_BYTES:
                data, self._rest = data + self._rest, b""
                self.whole = False
        return self._account(data) if data else data

    def flush(self) -> bytes | None:
        """Return what is left when the worker has ended the stream; normally nothing.

        A last event that only lacks its blank line is completed. A browser would drop it.

        Returns:
            The rest, or None if the stream ended within an event: the worker was cut off.
        """
        data, self._rest = self._rest, b""
        if not data.strip(b"\r\n"):
            return data
        if data[-1:] not in (b"\n", b"\r"):
            if not _is_whole(data):
                return None
            data += b"\n"
        return self._account(data + b"\n")

    def _account(self, events: bytes) -> bytes:
        tells_usage = b'"usage"' in events
        if tells_usage:
            self.usage = read_usage(events) or self.usage
        if self._rewriter is not None:
            events = self._rewriter(events, tells_usage=tells_usage)
        self.events += _count_data(events)
        if self._count_text:
            self.text_bytes += self._text_of(events)
        return events

    def _text_of(self, events: bytes) -> int:
        """Return the bytes of text in events, those of a length that was seen before unread."""
        # Events of one stream differ in their text only, and most of it is a few bytes long.
        size = len(events)
        found = self._text_by_size.get(size)
        if found is None:
            found = sum(map(len, _TEXT.findall(events)))
            if size <= MAX_KNOWN_SIZE:
                self._text_by_size[size] = found
        return found


def _count_data(events: bytes) -> int:
    """Count the events that carry data; a comment or a retry hint does not."""
    if b"\r" in events:
        return sum(_DATA_LINE.search(event) is not None for event in BLANK_LINE.split(events))
    if events.startswith(b"data:") and events.endswith(b"\n\n"):
        # As most do, each may begin with its data.
        count = events.count(b"\n\n")
        if count == 1 or events.count(b"\n\ndata:") == count - 1:
            return count
    return sum(event.startswith(b"data:") or b"\ndata:" in event for event in events.split(b"\n\n"))


def _is_whole(event: bytes) -> bool:
    """Whether the last line of an event that has no line end is all there."""
    payload = event.splitlines()[-1].removeprefix(b"data:").strip()
    if payload == b"[DONE]":
        return True
    try:
        json.loads(payload)
    except (ValueError, RecursionError):
        return False
    return True


def _end_of_events(data: bytes) -> int:
    if b"\r" not in data:
        return data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
    end = 0
    for match in BLANK_LINE.finditer(data):
        end = match.end()
    return end
