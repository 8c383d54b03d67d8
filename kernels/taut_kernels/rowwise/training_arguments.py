"""Checks that the training ops' public functions share."""

from __future__ import annotations

import torch
from torch import Tensor

from taut_kernels.rowwise.rows import trainable_rows

MAX_N = 262144
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rows_of(name: str, x: Tensor, most: int = MAX_N) -> Tensor:
    """View an operand as rows [M, N].

    Args:
        name: of the argument, for errors.
        x: [..., N] bf16, fp16 or fp32, on the CPU also fp64 (for gold results).
        most: largest number of columns.

    Raises:
        ValueError: dtype, columns or layout are not supported; names the argument.
    """
    dtypes = (*_DTYPES, torch.float64) if x.device.type == "cpu" else _DTYPES
    return trainable_rows(name, x, dtypes, most)


def check_like(name: str, other: Tensor, x: Tensor) -> Tensor:
    """View an operand that has to be like ``x`` as rows.

    Raises:
        ValueError: another shape, dtype or device, or an unsupported layout; names the argument.
    """
    if other.shape != x.shape or other.dtype is not x.dtype or other.device != x.device:
        wanted = f"{tuple(x.shape)} {x.dtype} on {x.device}"
        found = f"{tuple(other.shape)} {other.dtype} on {other.device}"
        raise ValueError(f"{name} must be {wanted}, got {found}")
    return rows_of(name, other)


def refuse_second_derivative(op: str) -> None:
    """Raise where the derivative of a backward op is asked for.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(f"taut::{op}_backward has no derivative: {op} can be derived once")
