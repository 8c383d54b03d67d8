"""Bytes and FLOPs of a piece of computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Work:
    """What a computation has to do.

    Attributes:
        flops: additions and multiplications one by one (a multiply-add is two); an elementary
            function counts one, as does a comparison, and integer operations count the same.
        read: bytes read from memory.
        written: bytes written to memory.
    """

    flops: int = 0
    read: int = 0
    written: int = 0

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    @property
    def intensity(self) -> float:
        """FLOPs a byte moved; infinite where nothing is moved but something computed."""
        if self.moved:
            return self.flops / self.moved
        return float("inf") if self.flops else 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.read + other.read, self.written + other.written)


def nbytes(*tensors: Tensor | None) -> int:
    """Bytes of the elements of these tensors; an absent one has none."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


class Arguments(SimpleNamespace):
    """The arguments of one call of an op of ours, by the names of its schema."""


def arguments_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Name the arguments of a call.

    Args:
        func: an overload of an op of ours.
        args: as it got them.
        kwargs: likewise.

    Returns:
        Also what only the op's default overload has: its default there, or None.
    """
    default = func.overloadpacket.default._schema.arguments
    named = zip((each.name for each in func._schema.arguments), args, strict=False)
    found = {each.name: each.default_value for each in (*default, *func._schema.arguments)}
    return Arguments(**{**found, **dict(named), **kwargs})
