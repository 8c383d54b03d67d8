"""Divergences of student and teacher logits over whole rows: reference and launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from taut_kernels.launch import launcher
from taut_kernels.loss import tiles as tiles_loss
from taut_kernels.loss.divergence_kernel import divergence_kernel
from taut_kernels.loss.reduction import accumulator

FORMS = ("forward_kl", "reverse_kl", "jsd")
_launcher = launcher.Launcher(divergence_kernel)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Which divergence.

    Attributes:
        form: one of `FORMS`.
        temperature: both distributions are softmax(logits / temperature).
        beta: the teacher's share of the mixture, in ``jsd``.
    """

    form: str
    temperature: float
    beta: float


Rows = Callable[
    [
        Tensor,
        Tensor,
        Tensor,
        Divergence,
        Tensor | None,
        Tensor | None,
    ],
    Tensor,
]
"""A kernel over whole rows: :func:`divergence_ref` or :func:`launch`."""


def _times_log_ratio(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    return torch.where(p > 0, p * (log_p - log_q), 0.0)


def divergence_ref(
    student: Tensor,
    teacher: Tensor,
    keep: Tensor,
    divergence: Divergence,
    scale: Tensor | None = None,
    grad: Tensor | None = None,
) -> Tensor:
    """Compute rows in plain torch: the specification, and the ops' CPU implementation.

    Args:
        student: [M, V] logits; fp64 gives fp64.
        teacher: [M, V] logits.
        keep: [M] bool, rows that count.
        divergence: which.
        scale: [M] factors of the rows' gradients; None without ``grad``.
        grad: [M, V], written, may be ``student``; None for no gradient.

    Returns:
        Losses [M] in fp32 or fp64.
    """
    dtype, T, beta = accumulator(student.dtype), divergence.temperature, divergence.beta
    log_p = (student.to(dtype) / T).log_softmax(dim=1)
    log_q = (teacher.to(dtype) / T).log_softmax(dim=1)
    p, q = log_p.exp(), log_q.exp()
    if divergence.form == "forward_kl":
        losses, g = _times_log_ratio(q, log_q, log_p).sum(dim=1), p - q
    else:
        jsd = divergence.form == "jsd"
        log_m = (beta * q + (1 - beta) * p).log() if jsd else log_q
        student_part = _times_log_ratio(p, log_p, log_m)
        student_sum = student_part.sum(dim=1)
        g = student_part - p * student_sum.unsqueeze(1)
        losses = student_sum
        if jsd:
            g = g * (1 - beta)
            teacher_sum = _times_log_ratio(q, log_q, log_m).sum(dim=1)
            losses = beta * teacher_sum + (1 - beta) * student_sum
    if grad is not None:
        assert scale is not None
        grad.copy_((g * (scale * T).unsqueeze(1)).where(keep.unsqueeze(1), 0.0))
    return (losses * T**2).where(keep, 0.0)


def launch(
    student: Tensor,
    teacher: Tensor,
    keep: Tensor,
    divergence: Divergence,
    scale: Tensor | None = None,
    grad: Tensor | None = None,
    tile: tiles_loss.LossTile | None = None,
) -> Tensor:
    """Compute rows with the kernel; arguments and result as :func:`divergence_ref`.

    Args:
        student: likewise, rows at any stride.
        teacher: likewise.
        keep: likewise.
        divergence: likewise.
        scale: likewise, fp32.
        grad: likewise.
        tile: how to cut the work; None: by the tables.
    """
    M, V = student.shape
    losses = launcher.empty((M,), dtype=torch.float32, device=student.device)
    if M == 0:
        return losses
    tile = tile or tiles_loss.lookup(launcher.gpu_name(student.device), "divergence", V)
    strides = (student.stride(0), teacher.stride(0), 0 if grad is None else grad.stride(0))
    constants: dict[str, Any] = {
        "V": V,
        "FORM": divergence.form,
        "BLOCK": tile.block,
        "STAGES": tile.stages,
    }
    options = tiles_loss.launch_options(tile.num_warps)
    types = (student.dtype, teacher.dtype, None if grad is None else grad.dtype)
    _launcher(
        (types, tuple(constants.values()), tile.num_warps),
        (M, 1, 1),
        (student, teacher, scale, keep.to(torch.int8), losses, grad),
        (M, *strides, divergence.temperature, divergence.beta),
        lambda: (constants, options),
        strides,
    )
    return losses
