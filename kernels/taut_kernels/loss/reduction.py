"""What the losses share around their kernels: which rows count, weights of rows, reductions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

REDUCTIONS = ("mean", "sum", "none")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the type statistics are kept in: fp32, or fp64 for fp64 (gold results)."""
    return torch.promote_types(dtype, torch.float32)


def row_scale(counts: Tensor, reduction: str, dtype: torch.dtype) -> Tensor:
    """Return ∂loss/∂(row's loss), on the device: no synchronisation.

    Args:
        counts: [M] bool, the rows that count.
        reduction: one of `REDUCTIONS`.
        dtype: of the result.

    Returns:
        [M]: 1 / number of rows that count for ``mean``, else 1; 0 for the others.
    """
    ones = counts.to(dtype)
    return ones / ones.sum().clamp(min=1) if reduction == "mean" else ones


def reduce(losses: Tensor, counts: Tensor, reduction: str) -> Tensor:
    """Reduce the rows' losses; the mean over no row is 0.

    Args:
        losses: [M], 0 for rows that do not count.
        counts: [M] bool.
        reduction: one of `REDUCTIONS`.

    Returns:
        [M] for ``none``, else a scalar.
    """
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / counts.sum().clamp(min=1) if reduction == "mean" else total


def loss_shape(rows: int | torch.SymInt, reduction: str) -> tuple[int | torch.SymInt, ...]:
    """Return the shape of a reduced loss."""
    return (rows,) if reduction == "none" else ()


def forward_computes_gradients(dtype: torch.dtype, reduction: str) -> bool:
    """Say whether a gradient can be computed before the backward pass begins.

    Not for ``none``, where each row's factor is known only then, and not in fp16, where 1/n times a
    probability is below the smallest number: there the loss scale has to come in first.
    """
    return reduction != "none" and dtype is not torch.float16


def wanted_gradients(
    operands: Sequence[Tensor | None], reduction: str, use_checkpoint: bool
) -> list[bool]:
    """Say which gradients the forward pass is to compute.

    Args:
        operands: of the projection, the first in the dtype of the logits; an absent one wants none.
        reduction: one of `REDUCTIONS`.
        use_checkpoint: compute them all in the backward pass.
    """
    first = operands[0]
    assert first is not None
    if use_checkpoint or not forward_computes_gradients(first.dtype, reduction):
        return [False] * len(operands)
    enabled = torch.is_grad_enabled()
    return [enabled and operand is not None and operand.requires_grad for operand in operands]


def check_options(
    reduction: str, label_smoothing: float, z_loss: float, softcap: float | None
) -> None:
    """Hold the options all cross entropies have to their ranges.

    Raises:
        ValueError: one is outside; names it.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be mean, sum or none, got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must lie in 0..1, got {label_smoothing}")
    if not 0.0 <= z_loss < math.inf:
        raise ValueError(f"z_loss must be at least 0 and finite, got {z_loss}")
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"softcap must be above 0 and finite, or None, got {softcap}")


def refuse_double_backward(op: str) -> None:
    """Raise where a backward pass is to be differentiated itself.

    Raises:
        RuntimeError: the caller runs with ``create_graph=True``.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"taut::{op} can be differentiated once; create_graph is not supported")
