"""Checks of class indices."""

from __future__ import annotations

import torch
from torch import Tensor


def check_labels(target: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Hold a target's shape, type and place to what the rows need.

    Raises:
        ValueError: one is wrong.
    """
    if tuple(target.shape) != tuple(shape):
        raise ValueError(f"target must have shape {tuple(shape)}, got {tuple(target.shape)}")
    if target.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"target must be int64 or int32, got {target.dtype}")
    if target.device != device:
        raise ValueError(f"target must be on {device}, got {target.device}")


def check_values(target: Tensor, V: int, ignore_index: int) -> None:
    """Look whether every target is in the vocabulary; waits for the device.

    Args:
        target: [M] int64.
        V: vocabulary.
        ignore_index: the one value outside it that is allowed.

    Raises:
        ValueError: one is not; names the first.
    """
    wrong = ((target < 0) | (target >= V)) & (target != ignore_index)
    if wrong.any():
        row = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"target must lie in 0..{V - 1} or be ignore_index {ignore_index}, "
            f"got {int(target[row])} at row {row}"
        )


def is_long(index: int) -> bool:
    """Say whether Triton passes an index in 64 bits."""
    return not -(2**31) <= index < 2**31
