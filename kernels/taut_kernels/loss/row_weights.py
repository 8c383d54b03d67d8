"""Which rows count and how much, and the loss of all: what surrounds cross entropy's kernel.

On CUDA two launches; torch's nine take 20 µs, a tenth of what 8192 rows of 32000 columns do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from taut_kernels.launch import launcher
from taut_kernels.loss.reduction import row_scale
from taut_kernels.loss.row_weights_kernel import row_weights_kernel, weighted_sum_kernel
from taut_kernels.loss.target import is_long
from taut_kernels.loss.tiles import launch_options

BLOCK = 8192
NUM_WARPS = 32
MAX_ROWS = 2**17
"""More are torch's: each program of ours walks over all of them."""
_weights = launcher.Launcher(row_weights_kernel)
_sum = launcher.Launcher(weighted_sum_kernel)


def row_weights(target: Tensor, ignore_index: int, reduction: str, dtype: torch.dtype) -> Tensor:
    """Return ∂loss/∂(row's loss): 1, or 1 / number of rows that count for ``mean``; 0 of others.

    Args:
        target: [M] int64, contiguous.
        ignore_index: target of rows that do not count.
        reduction: ``mean``, ``sum`` or ``none``.
        dtype: of the result: fp32, or fp64 on the CPU.

    Returns:
        [M].
    """
    if not target.is_cuda or not 0 < target.numel() <= MAX_ROWS:
        return row_scale(target != ignore_index, reduction, dtype)
    return launch_row_weights(target, ignore_index, mean=reduction == "mean")


def launch_row_weights(target: Tensor, ignore_index: int, *, mean: bool) -> Tensor:
    """Compute :func:`row_weights` with the kernel.

    Args:
        target: [M] int64, contiguous, at least one.
        ignore_index: target of rows that do not count.
        mean: divide by the number of those that do.

    Returns:
        [M] fp32.
    """
    M = target.numel()
    weights = launcher.empty((M,), dtype=torch.float32, device=target.device)
    _weights(
        (mean, is_long(ignore_index)),
        (-(-M // BLOCK), 1, 1),
        (target, weights),
        (M, ignore_index),
        lambda: ({"MEAN": mean, "BLOCK": BLOCK}, launch_options(NUM_WARPS)),
    )
    return weights


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """Return Σ losses · weights, a scalar on the device; no synchronisation.

    Args:
        losses: [M], 0 for rows that do not count.
        weights: [M], of :func:`row_weights`.
    """
    if not losses.is_cuda or not 0 < losses.numel() <= MAX_ROWS:
        return (losses * weights).sum()
    return launch_weighted_sum(losses, weights)


def launch_weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """Compute :func:`weighted_sum` with the kernel.

    Args:
        losses: [M] fp32, contiguous.
        weights: [M] fp32, contiguous.
    """
    total = launcher.empty((), dtype=torch.float32, device=losses.device)
    _sum(
        (),
        (1, 1, 1),
        (losses, weights, total),
        (losses.numel(),),
        lambda: ({"BLOCK": BLOCK}, launch_options(NUM_WARPS)),
    )
    return total
