"""Checks that the row-wise ops' public functions share."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check_epsilon(epsilon: float) -> None:
    """Hold what a norm adds under its root to its range.

    Raises:
        ValueError: it is negative, infinite or not a number.
    """
    if not 0.0 <= epsilon < math.inf:
        raise ValueError(f"epsilon must be at least 0 and finite, got {epsilon}")


def as_rows(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], most: int) -> Tensor:
    """View ``x`` as rows [M, columns] without a copy, for an op that is forward only.

    Args:
        name: of the argument, for errors.
        x: [..., columns] of any dimensions, rows at one stride.
        dtypes: what the op takes.
        most: largest number of columns.

    Returns:
        The view.

    Raises:
        ValueError: the dtype, the number of columns or the layout is not supported, or ``x`` wants
            a gradient.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{name} requires grad: the op is forward only, call it under no_grad()")
    return trainable_rows(name, x, dtypes, most)


def trainable_rows(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], most: int) -> Tensor:
    """View ``x`` as rows for an op with a gradient; arguments and errors as :func:`as_rows`."""
    if x.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} must be {names}, got {str(x.dtype).removeprefix('torch.')}")
    if x.dim() == 0 or not 1 <= x.shape[-1] <= most:
        raise ValueError(f"{name} must have 1..{most} columns, got shape {tuple(x.shape)}")
    try:
        rows = x.view(-1, x.shape[-1])
    except RuntimeError:
        raise ValueError(f"{name} must have its rows at one stride, got {x.stride()}") from None
    if rows.stride(1) != 1 and rows.shape[1] > 1:
        raise ValueError(f"{name} must have its columns next to each other, got {x.stride()}")
    return rows


def check_scale(scale: Tensor, x: Tensor) -> None:
    """Hold a static scale to its contract: one fp32 element beside ``x``.

    Raises:
        ValueError: it is anything else.
    """
    if scale.dtype is not torch.float32 or scale.numel() != 1:
        shape = tuple(scale.shape)
        raise ValueError(f"scale must be one float32 element, got {shape} {scale.dtype}")
    if scale.device != x.device:
        raise ValueError(f"scale must be on {x.device}, got {scale.device}")


def check_parameter(name: str, parameter: Tensor, x: Tensor) -> None:
    """Hold a weight or bias to its contract: [N], dtype of ``x`` or fp32.

    Raises:
        ValueError: anything else; names the argument.
    """
    if tuple(parameter.shape) != (x.shape[-1],):
        raise ValueError(f"{name} must have shape {(x.shape[-1],)}, got {tuple(parameter.shape)}")
    if parameter.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"{name} must be {x.dtype} or torch.float32, got {parameter.dtype}")
    if parameter.device != x.device:
        raise ValueError(f"{name} must be on {x.device}, got {parameter.device}")
    if not parameter.is_contiguous():
        raise ValueError(f"{name} must be contiguous")
