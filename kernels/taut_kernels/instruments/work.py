"""Bytes and FLOPs of a piece of computation."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of the elements of these tensors; an absent one has none."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
