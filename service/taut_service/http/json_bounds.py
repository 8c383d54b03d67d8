"""How many values a JSON text holds and how deep they nest, told before any of it is parsed.

A parsed body is far larger than its text: four megabytes of ``{},`` become ninety of objects. So
commas and opening brackets are counted first. Most bodies are cleared by counting in the whole
text, strings included, which can only count too much; only the rest is looked at closely.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Final, NamedTuple

from taut_service.errors import RequestError

LIGHT_BYTES: Final = 256 * 1024
LIGHT_NODES: Final = 10_000
"""Up to both a body is parsed on the event loop: a few milliseconds at the very most."""
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_PIECE = 256 * 1024
"""Bytes looked at in one go; between two of them another thread may run."""


class Shape(NamedTuple):
    """Size of a JSON text.

    Args:
        nodes: commas and opening brackets; no fewer than values less one.
        depth: of brackets.
    """

    nodes: int
    depth: int


def is_light(body: bytes) -> bool:
    """Whether a body is parsed in a few milliseconds; doubt is a no."""
    size = len(body)
    return size <= LIGHT_NODES or (
        size <= LIGHT_BYTES
        and body.count(b",") + body.count(b"[") + body.count(b"{") <= LIGHT_NODES
    )


def exact(body: bytes, enough: int) -> Shape:
    """Return the shape outside of strings; of a text that is not JSON, some shape.

    Args:
        body: JSON.
        enough: stop when there are more nodes than that.
    """
    nodes = depth = deepest = 0
    in_string = False
    start = 0
    while start < len(body) and nodes <= enough:
        end = min(start + _PIECE, len(body))
        # Escapes are two bytes: a piece must not end within one.
        while end < len(body) and body[end - 1] == 0x5C:
            end += 1
        outside, in_string = _outside_strings(body[start:end], in_string)
        nodes += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        steps = map(_STEPS.__getitem__, outside.translate(None, _NOT_BRACKETS))
        levels = list(accumulate(steps, initial=depth))
        depth = levels[-1]
        levels.append(deepest)
        deepest = max(levels)
        start = end
    return Shape(nodes, deepest)


def _outside_strings(piece: bytes, in_string: bool) -> tuple[bytes, bool]:
    """Return what is not within a string, and whether the piece ends within one."""
    if b"\\" in piece:
        # Pairs first: what is left of a run of backslashes escapes the byte after it.
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
    parts = piece.split(b'"')
    return b"".join(parts[in_string::2]), in_string ^ (len(parts) % 2 == 0)


def check_shape(body: bytes, max_nodes: int, max_depth: int) -> None:
    """Insist on bounds.

    Args:
        body: JSON, hopefully.
        max_nodes: most commas and opening brackets outside of strings.
        max_depth: deepest nesting.

    Raises:
        RequestError: one of them is passed.
    """
    opening = body.count(b"[") + body.count(b"{")
    if opening <= max_depth and (len(body) <= max_nodes or opening + body.count(b",") <= max_nodes):
        return
    shape = exact(body, max_nodes)
    if shape.nodes > max_nodes:
        text = f"holds more than {max_nodes} values (limits.max_json_nodes)"
    elif shape.depth > max_depth:
        text = f"nests deeper than {max_depth} levels (limits.max_json_depth)"
    else:
        return
    raise RequestError(f"the request body {text}", code="invalid_json")
