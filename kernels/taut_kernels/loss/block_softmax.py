"""Kernels over [rows, columns] of the logits: a row's running statistics, and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from taut_kernels.launch import launcher
from taut_kernels.loss.row_softmax import Objective
from taut_kernels.loss.target import is_long
from taut_kernels.loss.tiles import launch_options
from taut_kernels.loss.vocabulary_block_kernel import block_gradient_kernel, block_statistics_kernel

MOST_COLUMNS = 8192
"""Of a block: a program keeps its row's part in registers."""
_statistics = launcher.Launcher(block_statistics_kernel)
_gradient = launcher.Launcher(block_gradient_kernel)
_LOG2E = 1.4426950408889634


class Statistics:
    """What is known of each row after some blocks of the vocabulary.

    Args:
        M: rows.
        dtype: fp32, or fp64 on the CPU.
        device: where.

    Attributes:
        values: [4, M]: largest logit · log2 e; Σ 2^(logit · log2 e − largest); the target's logit;
            the logits' sum (with label smoothing).
    """

    def __init__(self, M: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros((4, M), dtype=dtype, device=device)
        self.values[0] = float("-inf")

    def finish(self, target: Tensor, objective: Objective, V: int) -> tuple[Tensor, Tensor]:
        """Return losses and lse, [M] each, once every block was taken in.

        Args:
            target: [M].
            objective: options.
            V: vocabulary.
        """
        maximum, sums, z_target, z_sums = self.values
        lse = (maximum + sums.log2()) / _LOG2E
        smoothing = objective.label_smoothing
        smoothed = (1 - smoothing) * z_target + smoothing * (z_sums / V)
        losses = lse - smoothed + objective.z_loss * lse.square()
        losses = losses.masked_fill((target < 0) | (target >= V), float("nan"))
        counts = target != objective.ignore_index
        return losses.where(counts, 0.0), lse.where(counts, 0.0)


def _capped(logits: Tensor, dtype: torch.dtype, softcap: float) -> Tensor:
    z = logits.to(dtype)
    return softcap * torch.tanh(z / softcap) if softcap else z


def statistics_ref(
    logits: Tensor, target: Tensor, statistics: Tensor, start: int, objective: Objective
) -> None:
    """Take a block into the statistics, in plain torch.

    Args:
        logits: [R, columns].
        target: [R] int64.
        statistics: [4, R] of :class:`Statistics`, changed.
        start: first column's place in the vocabulary.
        objective: options.
    """
    z = _capped(logits, statistics.dtype, objective.softcap)
    local = target - start
    inside = (local >= 0) & (local < logits.shape[1])
    found = z.gather(1, local.where(inside, 0).unsqueeze(1)).squeeze(1)
    statistics[2] = found.where(inside, statistics[2])
    statistics[3] += z.sum(dim=1)
    z2 = z * _LOG2E
    raised = torch.maximum(statistics[0], z2.amax(dim=1))
    shift = raised.masked_fill(raised == float("-inf"), 0.0)
    block = torch.exp2(z2 - shift.unsqueeze(1)).sum(dim=1)
    statistics[1] = statistics[1] * torch.exp2(statistics[0] - shift) + block
    statistics[0] = raised


def gradient_ref(
    logits: Tensor,
    grad: Tensor,
    target: Tensor,
    scale: Tensor,
    lse: Tensor,
    start: int,
    V: int,
    objective: Objective,
) -> None:
    """Write a block's gradient, in plain torch.

    Args:
        logits: [R, columns].
        grad: [R, columns], may be ``logits``.
        target: [R] int64.
        scale: [R] factors of the rows.
        lse: [R].
        start: first column's place in the vocabulary.
        V: vocabulary.
        objective: options.
    """
    z = _capped(logits, lse.dtype, objective.softcap)
    smoothing = objective.label_smoothing
    g = (z - lse.unsqueeze(1)).exp() * (1 + 2 * objective.z_loss * lse).unsqueeze(1) - smoothing / V
    columns = torch.arange(start, start + z.shape[1], device=z.device)
    g = torch.where(columns == target.unsqueeze(1), g - (1 - smoothing), g)
    if objective.softcap:
        g = g * (1 - (z / objective.softcap).square())
    scale = scale.masked_fill((target < 0) | (target >= V), float("nan"))
    counts = (target != objective.ignore_index).unsqueeze(1)
    grad.copy_((g * scale.unsqueeze(1)).where(counts, 0.0))


def block_options(columns: int) -> tuple[int, int]:
    """Return columns a program holds, a power of two, and warps that hold them."""
    block = max(16, 1 << (columns - 1).bit_length())
    return block, 4 if block <= 1024 else 8 if block <= 4096 else 16


def launch_statistics(
    logits: Tensor, target: Tensor, statistics: Tensor, start: int, objective: Objective
) -> None:
    """Take a block into the statistics with the kernel; arguments as :func:`statistics_ref`."""
    R, columns = logits.shape
    if R == 0:
        return
    block, num_warps = block_options(columns)
    constants = {
        "HAS_SMOOTHING": objective.label_smoothing > 0,
        "HAS_SOFTCAP": objective.softcap > 0,
        "COLUMNS": columns,
        "BLOCK": block,
    }
    _statistics(
        (logits.dtype, tuple(constants.values())),
        (R, 1, 1),
        (logits, target, *statistics),
        (logits.stride(0), start, objective.softcap),
        lambda: (constants, launch_options(num_warps)),
        (logits.stride(0),),
    )


def launch_gradient(
    logits: Tensor,
    grad: Tensor,
    target: Tensor,
    scale: Tensor,
    lse: Tensor,
    start: int,
    V: int,
    objective: Objective,
) -> None:
    """Write a block's gradient with the kernel; arguments as :func:`gradient_ref`."""
    R, columns = logits.shape
    if R == 0:
        return
    block, num_warps = block_options(columns)
    constants: dict[str, Any] = {
        "V": V,
        "HAS_SMOOTHING": objective.label_smoothing > 0,
        "HAS_SOFTCAP": objective.softcap > 0,
        "COLUMNS": columns,
        "BLOCK": block,
    }
    strides = (logits.stride(0), grad.stride(0))
    scalars = (objective.label_smoothing, objective.z_loss, objective.softcap)
    _gradient(
        (logits.dtype, grad.dtype, tuple(constants.values()), is_long(objective.ignore_index)),
        (R, 1, 1),
        (logits, grad, target, scale, lse),
        (*strides, start, objective.ignore_index, *scalars),
        lambda: (constants, launch_options(num_warps)),
        strides,
    )
