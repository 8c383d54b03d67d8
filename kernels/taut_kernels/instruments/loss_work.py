"""Bytes and FLOPs of the losses, forward and backward, like those of :mod:`.op_work`.

FLOPs beside the products (2·M·H·V each: the projection, and one for the gradient of x and of the
weight), for each of the M·V logits:

- softmax statistics: maximum, difference, exponential, sum: 4; soft cap (two products, tanh) 3 and
  label smoothing (the mean) 1 more
- the gradient: difference, exponential, scale: 3; soft cap 3 and label smoothing 1 more
- a divergence: both statistics, and p · (log p − log q) summed: 11; its gradient 3
- the bias' gradient, a sum: 1

Bytes are those of operands and results: chunks of logits that come and go are what a kernel pays
for its method, not what it cannot avoid.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from taut_kernels.instruments.work import Work, nbytes

_STATISTICS, _GRADIENT, _DIVERGENCE = 4, 3, 11
_SOFTCAP, _SMOOTHING = 3, 1


def _per_logit(base: int, label_smoothing: float, softcap: float) -> int:
    return base + _SMOOTHING * (label_smoothing != 0.0) + _SOFTCAP * (softcap != 0.0)


def _loss_bytes(x: torch.Tensor, reduction: str) -> int:
    size = 8 if x.dtype is torch.float64 else 4
    return size * (x.shape[0] if reduction == "none" else 1)


def _lse_bytes(x: torch.Tensor) -> int:
    return _loss_bytes(x, "none")


def _cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    check: bool,
    with_grad: bool = False,
) -> Work:
    del ignore_index, z_loss, check
    flops = _per_logit(_STATISTICS, label_smoothing, softcap)
    if with_grad:
        flops += _per_logit(_GRADIENT, label_smoothing, softcap)
    written = _loss_bytes(logits, reduction) + _lse_bytes(logits)
    written += nbytes(logits) if with_grad else 0
    return Work(flops * logits.numel(), nbytes(logits, target), written)


def _cross_entropy_(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    check: bool,
) -> Work:
    options = (ignore_index, label_smoothing, z_loss, softcap, reduction)
    return _cross_entropy(logits, target, *options, check, with_grad=True)


def _cross_entropy_backward(
    grad_loss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
) -> Work:
    del ignore_index, z_loss, reduction
    flops = _per_logit(_GRADIENT, label_smoothing, softcap) * logits.numel()
    return Work(flops, nbytes(grad_loss, logits, target, lse), nbytes(logits))


def _scale_(x: torch.Tensor, factor: torch.Tensor) -> Work:
    return Work(x.numel(), nbytes(x, factor), nbytes(x))


def _projected(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wants: list[bool]
) -> Work:
    """The projection, the wanted gradients' products, and their bytes."""
    (M, H), V = x.shape, weight.shape[0]
    products = 1 + wants[0] + wants[1]
    flops = 2 * M * H * V * products + M * V * wants[2]
    gradients = zip((x, weight, bias), wants, strict=True)
    written = sum(nbytes(operand) for operand, wanted in gradients if wanted)
    return Work(flops, nbytes(x, weight, bias), written)


def _linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    chunk_by: str,
    chunk_size: int,
    accumulate_fp32: bool,
    check: bool,
    wants: list[bool],
) -> Work:
    del ignore_index, z_loss, chunk_by, chunk_size, accumulate_fp32, check
    per_logit = _per_logit(_STATISTICS, label_smoothing, softcap)
    if any(wants):
        per_logit += _per_logit(_GRADIENT, label_smoothing, softcap)
    losses = _loss_bytes(x, reduction) + _lse_bytes(x)
    logits = x.shape[0] * weight.shape[0]
    return _projected(x, weight, bias, wants) + Work(per_logit * logits, nbytes(target), losses)


def _linear_cross_entropy_backward(
    grad_loss: torch.Tensor,
    lse: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    chunk_by: str,
    chunk_size: int,
    accumulate_fp32: bool,
    wants: list[bool],
) -> Work:
    del ignore_index, z_loss, reduction, chunk_by, chunk_size, accumulate_fp32
    logits = x.shape[0] * weight.shape[0]
    flops = _per_logit(_GRADIENT, label_smoothing, softcap) * logits
    return _projected(x, weight, bias, wants) + Work(flops, nbytes(grad_loss, lse, target))


def _linear_divergence(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    teacher_x: torch.Tensor,
    teacher_weight: torch.Tensor,
    teacher_bias: torch.Tensor | None,
    keep: torch.Tensor,
    form: str,
    temperature: float,
    beta: float,
    reduction: str,
    chunk_size: int,
    accumulate_fp32: bool,
    wants: list[bool],
) -> Work:
    del form, temperature, beta, chunk_size, accumulate_fp32
    student = _projected(x, weight, bias, wants)
    teacher = _projected(teacher_x, teacher_weight, teacher_bias, [False] * 3)
    per_logit = _DIVERGENCE + _GRADIENT * any(wants)
    logits = x.shape[0] * weight.shape[0]
    rest = Work(per_logit * logits, nbytes(keep), _loss_bytes(x, reduction))
    return student + teacher + rest


def _linear_divergence_backward(
    grad_loss: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    teacher_x: torch.Tensor,
    teacher_weight: torch.Tensor,
    teacher_bias: torch.Tensor | None,
    keep: torch.Tensor,
    form: str,
    temperature: float,
    beta: float,
    reduction: str,
    chunk_size: int,
    accumulate_fp32: bool,
    wants: list[bool],
) -> Work:
    del form, temperature, beta, reduction, chunk_size, accumulate_fp32
    student = _projected(x, weight, bias, wants)
    teacher = _projected(teacher_x, teacher_weight, teacher_bias, [False] * 3)
    # Without what the forward pass knew, both distributions are computed again.
    flops = (_DIVERGENCE + _GRADIENT) * x.shape[0] * weight.shape[0]
    return student + teacher + Work(flops, nbytes(grad_loss, keep))


LOSS_WORK: dict[str, Callable[..., Work]] = {
    "cross_entropy": _cross_entropy,
    "cross_entropy_": _cross_entropy_,
    "cross_entropy_backward": _cross_entropy_backward,
    "cross_entropy_backward_": _cross_entropy_backward,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_cross_entropy_backward": _linear_cross_entropy_backward,
    "linear_divergence": _linear_divergence,
    "linear_divergence_backward": _linear_divergence_backward,
    "scale_": _scale_,
}
"""Name in `torch.ops.taut` → its work from the op's arguments."""
