"""`taut::linear_divergence`: what :mod:`.linear_kl` and :mod:`.linear_jsd` call.

The maths and the contract are theirs. A chunk of rows at a time (:mod:`._row_chunks`), the logits
of student and teacher are made by torch (cuBLAS), one kernel turns the student's into their
gradient, and that meets the student's operands once: four products.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from taut_kernels.launch import launcher
from taut_kernels.launch.op_registration import register_op
from taut_kernels.loss import divergence as loss_divergence
from taut_kernels.loss import gradient_scale, row_chunks
from taut_kernels.loss.divergence import Divergence
from taut_kernels.loss.linear_cross_entropy import fake_gradients
from taut_kernels.loss.projection import (
    Gradients,
    Projection,
    Wants,
    autocast_operands,
    check_chunk,
    check_projection,
)
from taut_kernels.loss.reduction import (
    REDUCTIONS,
    accumulator,
    loss_shape,
    reduce,
    refuse_double_backward,
    row_scale,
    wanted_gradients,
)

WORKSPACE_BYTES = 512 * 2**20
"""Logits of student and teacher a chunk may have; not tuned."""
_ROW_MULTIPLE = 128


def default_chunk(V: int, itemsize: int) -> int:
    """Return how many rows fit the workspace.

    Args:
        V: vocabulary.
        itemsize: bytes of a student's and a teacher's logit together.
    """
    rows = WORKSPACE_BYTES // (V * itemsize)
    return max(_ROW_MULTIPLE, rows // _ROW_MULTIPLE * _ROW_MULTIPLE)


def _compute(
    rows: loss_divergence.Rows,
    student: Projection,
    teacher: Projection,
    keep: Tensor,
    divergence: Divergence,
    scale: Tensor,
    chunk_size: int,
    fp32: bool,
    wants: Wants,
) -> tuple[Tensor, Gradients]:
    x, V = student.x, student.weight.shape[0]
    chunk = chunk_size or default_chunk(V, x.itemsize + teacher.x.itemsize)
    losses = torch.empty(x.shape[0], dtype=accumulator(x.dtype), device=x.device)
    shape = (min(chunk, x.shape[0]), V)
    buffer = launcher.empty(shape, dtype=teacher.x.dtype, device=x.device)

    def gradient_of(logits: Tensor, place: slice) -> None:
        wanted = teacher.logits(buffer[: logits.shape[0]], place)
        differentiated = (scale[place], logits) if any(wants) else (None, None)
        losses[place] = rows(logits, wanted, keep[place], divergence, *differentiated)

    gradients = row_chunks.run(student, gradient_of, wants, chunk, fp32=fp32)
    return losses, gradients


def _run(
    rows: loss_divergence.Rows, given: tuple[Any, ...], grad_loss: Tensor | None
) -> tuple[Tensor, Any]:
    """Compute losses and gradients of operands and options in the order of the ops' schemas."""
    x, keep, reduction = given[0], given[6], given[10]
    chunk_size, accumulate_fp32, wants = given[11:]
    scale = row_scale(keep, reduction, accumulator(x.dtype))
    if grad_loss is not None:
        scale = (scale * grad_loss.to(scale.dtype)).contiguous()
    return _compute(
        rows,
        Projection(*given[:3]),
        Projection(*given[3:6]),
        keep,
        Divergence(*given[7:10]),
        scale,
        chunk_size,
        accumulate_fp32,
        Wants(*wants),
    )


def _linear_divergence(rows: loss_divergence.Rows, *given: Any) -> tuple[Tensor, ...]:
    losses, gradients = _run(rows, given, None)
    return reduce(losses, given[6], given[10]), *gradients


def _linear_divergence_backward(
    rows: loss_divergence.Rows, grad_loss: Tensor, *given: Any
) -> tuple[Tensor, ...]:
    return tuple(_run(rows, given, grad_loss)[1])


_OPERANDS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor teacher_x, Tensor teacher_weight, "
    "Tensor? teacher_bias, Tensor keep, str form, float temperature, float beta, "
    "str reduction, int chunk_size, bool accumulate_fp32, bool[] wants"
)


def _fake_linear_divergence(
    x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    shape = loss_shape(x.shape[0], options[7])
    loss = x.new_empty(shape, dtype=accumulator(x.dtype))
    return loss, *fake_gradients(x, weight, bias, options[-1])


def _fake_linear_divergence_backward(
    grad_loss: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    return fake_gradients(x, weight, bias, options[-1])


for _schema, _implementation, _fake in (
    (
        f"taut::linear_divergence({_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor)",
        _linear_divergence,
        _fake_linear_divergence,
    ),
    (
        f"taut::linear_divergence_backward(Tensor grad_loss, {_OPERANDS}) -> "
        "(Tensor, Tensor, Tensor)",
        _linear_divergence_backward,
        _fake_linear_divergence_backward,
    ),
):
    _cpu = partial(_implementation, loss_divergence.divergence_ref)
    register_op(_schema, _cpu, partial(_implementation, loss_divergence.launch), _fake)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *operands, wants = inputs
    gradients = output[1:]
    ctx.mark_non_differentiable(*gradients)
    ctx.set_materialize_grads(False)
    ctx.options, ctx.in_forward = tuple(operands[7:]), any(wants)
    ctx.save_for_backward(*(gradients if ctx.in_forward else operands[:7]))


def _autograd(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    refuse_double_backward("linear_divergence")
    return gradient_scale.of_projection(ctx, grad_loss, "linear_divergence")


torch.library.register_autograd("taut::linear_divergence", _autograd, setup_context=_setup_context)


def linear_divergence(
    divergence: Divergence,
    student: tuple[Tensor, Tensor, Tensor | None],
    teacher: tuple[Tensor, Tensor, Tensor | None],
    mask: Tensor | None,
    *,
    reduction: str,
    chunk_size: int | None,
    accumulate_fp32: bool,
    use_checkpoint: bool,
) -> Tensor:
    """Check the arguments of the public functions and call the op.

    Args:
        divergence: which.
        student: x [..., H], weight [V, H], bias [V] or None.
        teacher: x [..., Ht], weight [V, Ht], bias [V] or None.
        mask: [...] bool, rows that count, or None for all.
        reduction: ``mean`` over the rows that count, ``sum`` or ``none``.
        chunk_size: rows at a time, or None.
        accumulate_fp32: sum the weight's gradient in fp32.
        use_checkpoint: compute the gradients in the backward pass.

    Returns:
        The loss in fp32 (fp64 for fp64): a scalar, or [...] for ``none``.

    Raises:
        ValueError: an argument the contract does not allow; names it.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be mean, sum or none, got {reduction!r}")
    if not 0.0 < divergence.temperature < math.inf:
        raise ValueError(f"temperature must be above 0 and finite, got {divergence.temperature}")
    check_chunk(chunk_size)
    student, teacher = autocast_operands(*student), autocast_operands(*teacher)
    check_projection(*student)
    check_projection(*teacher, prefix="teacher_")
    shape = student[0].shape[:-1]
    _check_pair(student, teacher, mask)
    keep = torch.ones(shape, dtype=torch.bool, device=student[0].device) if mask is None else mask
    wants = wanted_gradients(student, reduction, use_checkpoint)
    loss: Tensor = torch.ops.taut.linear_divergence(
        student[0].reshape(-1, student[0].shape[-1]),
        *student[1:],
        teacher[0].reshape(-1, teacher[0].shape[-1]),
        *teacher[1:],
        keep.reshape(-1).contiguous(),
        divergence.form,
        divergence.temperature,
        divergence.beta,
        reduction,
        chunk_size or 0,
        accumulate_fp32,
        wants,
    )[0]
    return loss.view(shape) if reduction == "none" else loss


def _check_pair(
    student: tuple[Tensor, Tensor, Tensor | None],
    teacher: tuple[Tensor, Tensor, Tensor | None],
    mask: Tensor | None,
) -> None:
    x, weight, _ = student
    teacher_x, teacher_weight, _ = teacher
    shape = x.shape[:-1]
    if teacher_x.shape[:-1] != shape or teacher_x.device != x.device:
        wanted = f"{(*shape, teacher_x.shape[-1])} on {x.device}"
        found = f"{tuple(teacher_x.shape)} on {teacher_x.device}"
        raise ValueError(f"teacher_x must have shape {wanted}, got {found}")
    if teacher_weight.shape[0] != weight.shape[0]:
        found = f"{teacher_weight.shape[0]} and {weight.shape[0]}"
        raise ValueError(f"teacher_weight and weight must have one vocabulary, got {found}")
    if torch.is_grad_enabled():
        for name, operand in zip(("x", "weight", "bias"), teacher, strict=True):
            if operand is not None and operand.requires_grad:
                raise ValueError(f"teacher_{name} requires grad: detach it, it gets no gradient")
    if mask is not None and (
        mask.shape != shape or mask.dtype is not torch.bool or mask.device != x.device
    ):
        wanted = f"bool {tuple(shape)} on {x.device}"
        found = f"{mask.dtype} {tuple(mask.shape)} on {mask.device}"
        raise ValueError(f"mask must be {wanted}, got {found}")
