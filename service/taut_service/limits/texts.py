"""How much text a request holds: every string of it, wherever it stands.

A worker's chat template may put any field before the model, so nothing is left out: names and
numbers within tools, schemas and arguments count as well. What carries pictures and sound counts
less: their tokens follow from what is shown, not from its encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SCALAR_BYTES = 4
"""What a number, a null or an opening bracket counts within a field: about one token."""
MEDIA_SHARE = 128
"""A byte of text counts as much as so many of an encoded picture: 512 bytes a token."""
_SAMPLING = frozenset(
    {
        "allowed_token_ids",
        "include",
        "logit_bias",
        "logprob_token_ids",
        "metadata",
        "stop_token_ids",
        "stream_options",
    }
)
"""Fields no template shows: only their strings count, not their numbers and names."""
_MEDIA_FIELDS = ("image_url", "input_audio", "audio_url", "video_url", "source", "file")
_MAX_PARTS_DEPTH = 3


def text_bytes(document: dict[str, Any]) -> int:
    """Return the UTF-8 bytes of all text of a request but the name of its model.

    Args:
        document: any JSON object.

    Returns:
        At least the bytes of every string value, those of media divided by ``MEDIA_SHARE``.
    """
    total = 0
    for name, value in document.items():
        if type(value) is str:
            if name == "prompt_embeds":
                total += len(value) // MEDIA_SHARE
            elif name != "model":
                total += len(value) if value.isascii() else _encoded(value)
        elif type(value) is dict or type(value) is list:
            if name == "prompt_embeds":
                total += _strings(value) // MEDIA_SHARE
            else:
                total += _strings(value) if name in _SAMPLING else _nested(value)
    for name in ("messages", "input"):
        messages = document.get(name)
        if type(messages) is list:
            media = sum(_media(message, 0) for message in messages)
            total -= media - media // MEDIA_SHARE
    return total


def _encoded(text: str) -> int:
    return len(text.encode(errors="replace"))


def _nested(value: Any) -> int:
    """Return the bytes of strings, names and, as ``SCALAR_BYTES``, everything else."""
    total = 0
    waiting = [value]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind is str:
            total += len(value) if value.isascii() else _encoded(value)
        elif kind is dict:
            total += SCALAR_BYTES
            for name, item in value.items():
                total += len(name) if name.isascii() else _encoded(name)
                waiting.append(item)
        elif kind is list:
            total += SCALAR_BYTES
            waiting += value
        else:
            total += SCALAR_BYTES
    return total


def _strings(value: Any) -> int:
    """Return the bytes of strings alone."""
    total = 0
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if type(value) is str:
            total += _encoded(value)
        elif type(value) is dict:
            waiting += value.values()
        elif type(value) is list:
            waiting += value
    return total


def _media(message: Any, depth: int) -> int:
    """Return the bytes of encoded pictures and sound among the parts of a message."""
    if type(message) is not dict or depth == _MAX_PARTS_DEPTH:
        return 0
    total = 0
    for field in ("content", "output"):
        parts = message.get(field)
        if type(parts) is list:
            for part in parts:
                total += _media(part, depth + 1)
    if depth:
        for field in _MEDIA_FIELDS:
            total += sum(map(len, _payloads(message.get(field))))
    return total


def _payloads(value: Any) -> Iterator[str]:
    """Yield what is base64 in a part: a ``data:`` address, or the ``data`` of an object."""
    if type(value) is dict:
        data = value.get("data")
        if type(data) is str and data.isascii():
            yield data
        value = value.get("url")
    if type(value) is str and value.startswith("data:") and value.isascii():
        yield value
