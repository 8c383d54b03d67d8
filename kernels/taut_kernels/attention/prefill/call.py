"""What the launchers of prefill ask of a call: its settings, and the strides of its tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Settings(NamedTuple):
    """What both passes are told beside their tensors, in the order of the ops' arguments.

    Attributes:
        cu_q: bounds of packed sequences, or None.
        cu_k: likewise.
        max_q: queries of the longest sequence.
        max_k: keys of the longest sequence.
        causal: whether keys behind a query are hidden.
        window: keys a query sees, 0 for all.
        scale: factor of the scores, positive.
    """

    cu_q: Tensor | None
    cu_k: Tensor | None
    max_q: int
    max_k: int
    causal: bool
    window: int
    scale: float


def strides_of(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of sequence, token and head; sequences of a packed tensor have none."""
    if x.dim() == 3:
        return 0, x.stride(0), x.stride(1)
    return x.stride(0), x.stride(1), x.stride(2)


def lse_strides(lse: Tensor) -> tuple[int, int]:
    """Return the strides of sequence and head of lse, likewise."""
    return (0, lse.stride(0)) if lse.dim() == 2 else (lse.stride(0), lse.stride(1))


def count_sequences(q: Tensor, cu_q: Tensor | None) -> int:
    """Return how many sequences a batch has, or bounds of packed ones."""
    return q.shape[0] if cu_q is None else cu_q.shape[0] - 1


def length_of(x: Tensor) -> int:
    """Return tokens of each sequence of a batch; not used where sequences are packed."""
    return x.shape[1] if x.dim() == 4 else 0
