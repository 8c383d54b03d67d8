"""What makes two requests belong together: the beginning of their prompt, their session, their key.

Stateless: the answer comes from the request alone, so replicas of the gateway agree without
talking to each other. A prefix has several depths: one block, two blocks, … up to ``max_blocks``.
The shallowest is tried first; when the worker it points at has too much, the next depth spreads
requests that share only the beginning, each group still on its own worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from zlib import crc32

from taut_service.config.settings import Affinity
from taut_service.route.rendezvous import seed_of

_TEXTS: Final = ("prompt", "instructions", "system", "messages", "input")
"""Fields that hold a prompt, in the order in which a chat template puts them."""
_MAX_DEPTH: Final = 6
"""A list of messages with a list of parts with an object for an image is 5 deep."""


def affinity_keys(
    affinity: Affinity, beginning: str, session: str | None, caller: str | None
) -> Iterator[int]:
    """Return keys, most widely shared first; nothing where the request has no such thing.

    Args:
        affinity: the model's setting.
        beginning: of its prompt, see :func:`prompt_beginning`; unused unless by prefix.
        session: its session, if it has one.
        caller: name of its API key, if it has one.

    Returns:
        Keys of up to 64 bits for :mod:`taut_service.route.rendezvous`, made as they are wanted.
    """
    if affinity.by == "prefix":
        wanted = affinity.block_chars * affinity.max_blocks
        return _prefixes(beginning[:wanted], affinity.block_chars)
    name = session if affinity.by == "session" else caller
    return iter((seed_of(name.encode("utf-8", "surrogatepass")),) if name else ())


def _prefixes(text: str, block_chars: int) -> Iterator[int]:
    """Yield the hash of one block, of two, …; a last incomplete block counts only if alone."""
    # Not for secrets: two prefixes with one checksum share a worker, which costs nobody anything.
    checksum = 0
    for start in range(0, max(1, len(text) - block_chars + 1), block_chars):
        block = text[start : start + block_chars]
        if block:
            checksum = crc32(block.encode("utf-8", "surrogatepass"), checksum)
            yield checksum


def prompt_beginning(document: dict[str, Any], affinity: Affinity) -> str:
    """Return the first ``block_chars * max_blocks`` characters of a prompt, roles included.

    Args:
        document: the parsed request, of any route.
        affinity: how much is wanted.

    Returns:
        Text; token ids are written out as numbers.
    """
    wanted = affinity.block_chars * affinity.max_blocks
    prompt = document.get("prompt")
    if isinstance(prompt, str):
        return prompt[:wanted]
    pieces: list[str] = []
    for field in _TEXTS:
        value = document.get(field)
        if value is not None:
            wanted = _collect(value, pieces, wanted, 0)
            if wanted <= 0:
                break
    return "".join(pieces)


def _collect(value: Any, pieces: list[str], wanted: int, depth: int) -> int:
    """Append the text of a prompt: a string, token ids, messages, parts, or a list of such things.

    Of a list of prompts the first counts. Returns how many characters are still wanted.
    """
    if isinstance(value, str):
        pieces.append(value[:wanted])
        return wanted - len(value)
    if depth == _MAX_DEPTH:
        return wanted
    if isinstance(value, dict):
        role = value.get("role")
        if isinstance(role, str):
            wanted = _collect(role, pieces, wanted, depth)
        for field in ("content", "text", "image_url", "url"):
            if wanted > 0 and field in value:
                wanted = _collect(value[field], pieces, wanted, depth + 1)
    elif isinstance(value, list) and value:
        wanted = _collect_list(value, pieces, wanted, depth)
    return wanted


def _collect_list(value: list[Any], pieces: list[str], wanted: int, depth: int) -> int:
    first = value[0]
    if isinstance(first, int):
        ids = " ".join([str(item) for item in value[:wanted] if isinstance(item, int)])
        return _collect(ids, pieces, wanted, depth)
    for item in value if isinstance(first, dict) else value[:1]:
        if wanted <= 0:
            break
        wanted = _collect(item, pieces, wanted, depth + 1)
    return wanted
