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
from torch import Tensor

from taut_bench.instruments.work import Arguments, Work, nbytes

_STATISTICS, _GRADIENT, _DIVERGENCE = 4, 3, 11
_SOFTCAP, _SMOOTHING = 3, 1


def _per_logit(base: int, label_smoothing: float, softcap: float) -> int:
    return base + _SMOOTHING * (label_smoothing != 0.0) + _SOFTCAP * (softcap != 0.0)


def _loss_bytes(x: Tensor, reduction: str) -> int:
    size = 8 if x.dtype is torch.float64 else 4
    return size * (x.shape[0] if reduction == "none" else 1)


def _lse_bytes(x: Tensor) -> int:
    return _loss_bytes(x, "none")


def _cross_entropy_(call: Arguments) -> Work:
    """Loss and gradient."""
    statistics = _per_logit(_STATISTICS, call.label_smoothing, call.softcap)
    gradient = _per_logit(_GRADIENT, call.label_smoothing, call.softcap)
    losses = _loss_bytes(call.logits, call.reduction) + _lse_bytes(call.logits)
    flops = (statistics + gradient) * call.logits.numel()
    return Work(flops, nbytes(call.logits, call.target), losses + nbytes(call.logits))


def _cross_entropy(call: Arguments) -> Work:
    if call.with_grad:
        return _cross_entropy_(call)
    flops = _per_logit(_STATISTICS, call.label_smoothing, call.softcap) * call.logits.numel()
    losses = _loss_bytes(call.logits, call.reduction) + _lse_bytes(call.logits)
    return Work(flops, nbytes(call.logits, call.target), losses)


def _cross_entropy_backward(call: Arguments) -> Work:
    flops = _per_logit(_GRADIENT, call.label_smoothing, call.softcap) * call.logits.numel()
    return Work(
        flops, nbytes(call.grad_loss, call.logits, call.target, call.lse), nbytes(call.logits)
    )


def _scale_(call: Arguments) -> Work:
    return Work(call.x.numel(), nbytes(call.x, call.factor), nbytes(call.x))


def _projected(x: Tensor, weight: Tensor, bias: Tensor | None, wants: list[bool]) -> Work:
    """The projection, the wanted gradients' products, and their bytes."""
    (M, H), V = x.shape, weight.shape[0]
    products = 1 + wants[0] + wants[1]
    flops = 2 * M * H * V * products + M * V * wants[2]
    gradients = zip((x, weight, bias), wants, strict=True)
    written = sum(nbytes(operand) for operand, wanted in gradients if wanted)
    return Work(flops, nbytes(x, weight, bias), written)


def _linear_cross_entropy(call: Arguments) -> Work:
    per_logit = _per_logit(_STATISTICS, call.label_smoothing, call.softcap)
    if any(call.wants):
        per_logit += _per_logit(_GRADIENT, call.label_smoothing, call.softcap)
    losses = _loss_bytes(call.x, call.reduction) + _lse_bytes(call.x)
    logits = call.x.shape[0] * call.weight.shape[0]
    return _projected(call.x, call.weight, call.bias, call.wants) + Work(
        per_logit * logits, nbytes(call.target), losses
    )


def _linear_cross_entropy_backward(call: Arguments) -> Work:
    logits = call.x.shape[0] * call.weight.shape[0]
    flops = _per_logit(_GRADIENT, call.label_smoothing, call.softcap) * logits
    return _projected(call.x, call.weight, call.bias, call.wants) + Work(
        flops, nbytes(call.grad_loss, call.lse, call.target)
    )


def _linear_divergence(call: Arguments) -> Work:
    student = _projected(call.x, call.weight, call.bias, call.wants)
    teacher = _projected(call.teacher_x, call.teacher_weight, call.teacher_bias, [False] * 3)
    per_logit = _DIVERGENCE + _GRADIENT * any(call.wants)
    logits = call.x.shape[0] * call.weight.shape[0]
    rest = Work(per_logit * logits, nbytes(call.keep), _loss_bytes(call.x, call.reduction))
    return student + teacher + rest


def _linear_divergence_backward(call: Arguments) -> Work:
    student = _projected(call.x, call.weight, call.bias, call.wants)
    teacher = _projected(call.teacher_x, call.teacher_weight, call.teacher_bias, [False] * 3)
    # Without what the forward pass knew, both distributions are computed again.
    flops = (_DIVERGENCE + _GRADIENT) * call.x.shape[0] * call.weight.shape[0]
    return student + teacher + Work(flops, nbytes(call.grad_loss, call.keep))


LOSS_WORK: dict[str, Callable[[Arguments], Work]] = {
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
"""Name in `torch.ops.taut` → its work from a call's arguments."""
