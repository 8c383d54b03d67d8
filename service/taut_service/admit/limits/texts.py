"""How much text a request holds: every string of it, wherever it stands.

A worker's chat template may put any field before the model, so nothing is left out: names and
numbers within tools, schemas and arguments count as well. What carries pictures and sound counts
less: their tokens follow from what is shown, not from its encoding.
"""

from __future__ import annotations

from typing import Any, Final

SCALAR_BYTES: Final = 4
"""What a number, a null or an opening bracket counts within a field: about one token."""
MEDIA_SHARE = 128
"""A byte of text counts as much as so many of an encoded picture: 512 bytes a token."""
MEDIA_BYTES: Final = 4096
"""What is encoded in less than that counts as text."""
_SAMPLING: Final = frozenset(
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
_PROMPTS: Final = frozenset({"prompt", "input", "tokens"})
_MEDIA_FIELDS = ("image_url", "input_audio", "audio_url", "video_url", "source", "file")
_MAX_PARTS_DEPTH = 3


def text_bytes(document: dict[str, Any]) -> int:
    """Return the UTF-8 bytes of all text of a request but the name of its model.

    Args:
        document: any JSON object.

    Returns:
        At least the bytes of every string value, those of media divided by ``MEDIA_SHARE``; of
        every token id ``SCALAR_BYTES``.
    """
    total = 0
    for name, value in document.items():
        kind = type(value)
        if kind is str:
            if name != "model":
                total += len(value) if value.isascii() else _encoded(value)
        elif kind is list or kind is dict:
            if kind is list and name in _PROMPTS:
                total += sum(map(_of_prompt, value))
            elif name in _SAMPLING:
                total += _strings(value)
            else:
                total += _nested(value)
    return total if total < MEDIA_BYTES else total - _discount(document)


def _discount(document: dict[str, Any]) -> int:
    """Return by how much less media count than text."""
    media = 0
    embeds = document.get("prompt_embeds")
    for value in embeds if type(embeds) is list else (embeds,):
        media += _payload(value)
    for name in ("messages", "input"):
        messages = document.get(name)
        if type(messages) is list:
            media += sum(_media(message, 0) for message in messages)
    return media - media // MEDIA_SHARE


def _of_prompt(value: Any) -> int:
    """Return the bytes of a prompt: text, a token id, a list of token ids, or a message."""
    kind = type(value)
    if kind is str:
        return len(value) if value.isascii() else _encoded(value)
    # Anything that JSON can hold may be here: some routes leave these fields to the worker.
    return _nested(value) - SCALAR_BYTES * (kind is list)


def _encoded(text: str) -> int:
    return len(text.encode(errors="replace"))


def _nested(value: Any) -> int:
    """Return the bytes of strings, names and, as ``SCALAR_BYTES``, everything else."""
    total = 0
    # Lists and what a dictionary has in their place.
    waiting: list[Any] = [[value]]
    while waiting:
        value = waiting.pop()
        if type(value) is dict:
            for name in value:
                total += len(name) if name.isascii() else _encoded(name)
            value = value.values()
        for item in value:
            kind = type(item)
            if kind is str:
                total += len(item) if item.isascii() else _encoded(item)
            else:
                total += SCALAR_BYTES
                if kind is dict or kind is list:
                    waiting.append(item)
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
            value = message.get(field)
            if type(value) is dict:
                total += _payload(value.get("data"))
                value = value.get("url")
            if type(value) is str and value.startswith("data:"):
                total += _payload(value)
    return total


def _payload(value: Any) -> int:
    """Return the bytes of something encoded, 0 if it is none or small."""
    return len(value) if type(value) is str and len(value) > MEDIA_BYTES and value.isascii() else 0
