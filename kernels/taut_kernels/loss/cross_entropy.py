"""Cross entropy over long rows of logits: one read for the loss, the gradient in the same launch.

Maths     a = c · tanh(z / c) with a soft cap c, else a = z; lse = log Σ e^a
          loss = lse − (1 − ε) · a_y − ε · mean(a) + λ · lse²   (ε label smoothing, λ z-loss)
          ∂loss/∂z = (p · (1 + 2 · λ · lse) − (1 − ε) · [· = y] − ε / V) · (1 − (a / c)²)
Ops       `taut::cross_entropy` → loss, lse, gradient or nothing; `taut::cross_entropy_`, the
          gradient written over the logits; `taut::cross_entropy_backward` and `…_backward_`
Shapes    logits [M, V] or [B, T, V] bf16|fp16|fp32 at any strides; target [M] or [B, T] integers
          → loss fp32, [M] or [B, T] for reduction ``none``, else a scalar
Numerics  fp32 throughout, one rounding of the gradient. Rows equal to ignore_index give 0. A mean
          over no row is 0 (torch: NaN), so that a batch of padding leaves the weights alone. A
          target outside 0..V−1 raises ValueError on the CPU, or with check_targets; else on CUDA
          its loss and gradient are NaN, and nothing outside the row is read.
Gradient  in the forward pass for ``mean`` and ``sum`` (then one backward a graph), in the backward
          pass for ``none`` and fp16, where it needs what only that pass knows
CUDA      loss and gradient of many long bf16 rows on compute capability 9.0, without smoothing and
          soft cap: rows held on chip (:mod:`.cross_entropy_ring`), memory read
          once; everything else: rows read twice (:mod:`.cross_entropy_kernel`)
CPU       plain torch, also fp64: the specification
Limits    differentiable once; class weights and probabilities as targets are not supported
Source    online softmax: arXiv:1805.02867, alg. 3; z-loss: arXiv:2204.02311, §5; the gradient over
          the logits: Liger Kernel, arXiv:2410.10989, §3. Blocks, passes and code are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from taut_kernels.launch import launcher
from taut_kernels.launch.op_registration import register_op
from taut_kernels.loss import gradient_scale
from taut_kernels.loss.projection import DTYPES
from taut_kernels.loss.reduction import (
    accumulator,
    check_options,
    forward_computes_gradients,
    loss_shape,
    refuse_double_backward,
)
from taut_kernels.loss.row_softmax import Objective, Rows, cross_entropy_ref, launch
from taut_kernels.loss.row_weights import row_weights, weighted_sum
from taut_kernels.loss.target import check_labels, check_values

Options = tuple[int, float, float, float, str]
"""The fields of :class:`Objective`, and the reduction."""


def _forward(
    rows: Rows, logits: Tensor, target: Tensor, options: Options, check: bool, grad: Tensor | None
) -> tuple[Tensor, Tensor]:
    objective, reduction = Objective(*options[:4]), options[4]
    if check or not target.is_cuda:
        check_values(target, logits.shape[-1], objective.ignore_index)
    if reduction == "none" and grad is None:
        return rows(logits, target, objective, None, None, None)
    weights = row_weights(target, objective.ignore_index, reduction, accumulator(logits.dtype))
    losses, lse = rows(logits, target, objective, None if grad is None else weights, grad, None)
    return losses if reduction == "none" else weighted_sum(losses, weights), lse


# The options of the ops come in the order of their schemas: those of Objective, then the reduction.
def _cross_entropy(
    rows: Rows, logits: Tensor, target: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    check, with_grad = options[5:]
    shape = tuple(logits.shape) if with_grad else (0,)
    grad = launcher.empty(shape, dtype=logits.dtype, device=logits.device)
    return *_forward(rows, logits, target, options[:5], check, grad if with_grad else None), grad


def _cross_entropy_(
    rows: Rows, logits: Tensor, target: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    return _forward(rows, logits, target, options[:5], options[5], logits)


def _backward(rows: Rows, grad_loss: Tensor, *saved: Any, grad: Tensor) -> None:
    logits, target, lse, *objective, reduction = saved
    scale = row_weights(target, objective[0], reduction, lse.dtype) * grad_loss.to(lse.dtype)
    rows(logits, target, Objective(*objective), scale.contiguous(), grad, lse)


def _cross_entropy_backward(rows: Rows, grad_loss: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    grad = launcher.empty(tuple(logits.shape), dtype=logits.dtype, device=logits.device)
    _backward(rows, grad_loss, logits, *rest, grad=grad)
    return grad


def _cross_entropy_backward_(rows: Rows, grad_loss: Tensor, logits: Tensor, *rest: Any) -> None:
    _backward(rows, grad_loss, logits, *rest, grad=logits)


_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, float softcap, str reduction"
_BACKWARD = "Tensor target, Tensor lse, " + _OPTIONS


def _fake_losses(logits: Tensor, target: Tensor, reduction: str) -> list[Tensor]:
    dtype = accumulator(logits.dtype)
    shape = loss_shape(target.shape[0], reduction)
    return [logits.new_empty(shape, dtype=dtype), logits.new_empty(target.shape, dtype=dtype)]


def _fake_cross_entropy(logits: Tensor, target: Tensor, *options: Any) -> tuple[Tensor, ...]:
    reduction, _, with_grad = options[4:]
    grad = logits.new_empty(tuple(logits.shape) if with_grad else (0,))
    return *_fake_losses(logits, target, reduction), grad


def _fake_cross_entropy_(logits: Tensor, target: Tensor, *options: Any) -> tuple[Tensor, ...]:
    return tuple(_fake_losses(logits, target, options[4]))


def _fake_cross_entropy_backward(grad_loss: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(tuple(logits.shape))


_LIBRARY: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    (
        f"taut::cross_entropy(Tensor logits, Tensor target, {_OPTIONS}, bool check, bool with_grad)"
        " -> (Tensor, Tensor, Tensor)",
        _cross_entropy,
        _fake_cross_entropy,
    ),
    (
        f"taut::cross_entropy_(Tensor(a!) logits, Tensor target, {_OPTIONS}, bool check) -> "
        "(Tensor, Tensor)",
        _cross_entropy_,
        _fake_cross_entropy_,
    ),
    (
        f"taut::cross_entropy_backward(Tensor grad_loss, Tensor logits, {_BACKWARD}) -> Tensor",
        _cross_entropy_backward,
        _fake_cross_entropy_backward,
    ),
    (
        f"taut::cross_entropy_backward_(Tensor grad_loss, Tensor(a!) logits, {_BACKWARD}) -> ()",
        _cross_entropy_backward_,
        lambda *_: None,
    ),
)
for _schema, _implementation, _fake in _LIBRARY:
    _cpu, _cuda = partial(_implementation, cross_entropy_ref), partial(_implementation, launch)
    register_op(_schema, _cpu, _cuda, _fake)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, *options = inputs
    _, lse, grad = output
    ctx.mark_non_differentiable(lse, grad)
    ctx.set_materialize_grads(False)
    ctx.options, ctx.with_grad = tuple(options[:5]), options[6]
    ctx.save_for_backward(*((grad,) if ctx.with_grad else (logits, target, lse)))


def _autograd(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    refuse_double_backward("cross_entropy")
    saved = gradient_scale.saved_once(ctx, "cross_entropy")
    grad: Tensor | None = None
    if grad_loss is not None and ctx.with_grad:
        (grad,) = gradient_scale.scaled([saved[0]], grad_loss)
    elif grad_loss is not None:
        grad = torch.ops.taut.cross_entropy_backward(grad_loss, *saved, *ctx.options)
    return grad, *(None,) * 8


torch.library.register_autograd("taut::cross_entropy", _autograd, setup_context=_setup_context)


class _OverLogits(torch.autograd.Function):
    """The gradient takes the logits' place: their producer gets it, nobody else may read them."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, options: tuple[Any, ...], check: bool
    ) -> Tensor:
        # Below autograd, but the version counter is shared: whoever saved these logits for a
        # backward of their own gets torch's error instead of wrong values.
        rows = logits.detach()
        ctx.options = options
        ctx.in_forward = forward_computes_gradients(logits.dtype, options[4])
        loss: Tensor
        if ctx.in_forward:
            loss, _ = torch.ops.taut.cross_entropy_(rows, target, *options, check)
            ctx.save_for_backward(rows)
        else:
            loss, lse, _ = torch.ops.taut.cross_entropy(rows, target, *options, check, False)
            ctx.save_for_backward(rows, target, lse)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_double_backward("cross_entropy_")
        saved = gradient_scale.saved_once(ctx, "cross_entropy_")
        if ctx.in_forward:
            torch.ops.taut.scale_(saved[0], grad_loss)
        else:
            torch.ops.taut.cross_entropy_backward_(grad_loss, *saved, *ctx.options)
        return saved[0], None, None, None


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    in_place: bool = False,
    check_targets: bool = False,
) -> Tensor:
    """Compute the cross entropy of logits and class indices, differentiable by the logits.

    Args:
        logits: [..., V] bf16, fp16, fp32, or fp64 on the CPU; any strides, so that
            ``logits[:, :-1]`` is not copied.
        target: [...] int64 or int32.
        ignore_index: target of rows that do not count.
        label_smoothing: ε of the uniform distribution mixed in, 0..1.
        z_loss: λ of λ · lse², which keeps the normaliser near 1.
        softcap: c of c · tanh(logits / c), applied first; None for none.
        reduction: ``mean`` over the rows that count, ``sum`` or ``none``.
        in_place: the gradient takes the memory of ``logits``, whose values are lost when the
            backward pass ends (``mean``, ``sum``: at once). Needs contiguous logits that an
            operation made.
        check_targets: raise for a target outside the vocabulary on CUDA too, which waits for the
            device; without it such a target makes loss and gradient NaN.

    Returns:
        The loss in fp32 (fp64 for fp64): a scalar, or [...] for ``none``.

    Raises:
        ValueError: a shape, dtype, device or option the contract does not allow, or a target
            outside the vocabulary; names the argument.
        RuntimeError: in the backward pass: it is to be differentiated itself, or runs a second
            time over gradients computed in the forward pass.
    """
    check_options(reduction, label_smoothing, z_loss, softcap)
    _check(logits, target)
    rows = logits if logits.dim() in (2, 3) else logits.reshape(-1, logits.shape[-1])
    labels = target.reshape(-1).to(torch.int64).contiguous()
    options = (ignore_index, label_smoothing, z_loss, softcap or 0.0, reduction)
    wanted = torch.is_grad_enabled() and logits.requires_grad
    if in_place and wanted:
        if not logits.is_contiguous():
            raise ValueError(f"logits must be contiguous with in_place, got {logits.stride()}")
        if logits.is_leaf:
            raise ValueError("logits must not be a leaf with in_place: its values would be lost")
        loss: Tensor = _OverLogits.apply(rows, labels, options, check_targets)  # type: ignore[no-untyped-call]
    else:
        with_grad = wanted and forward_computes_gradients(logits.dtype, reduction)
        loss, _, _ = torch.ops.taut.cross_entropy(rows, labels, *options, check_targets, with_grad)
    return loss.view(target.shape) if reduction == "none" else loss


def _check(logits: Tensor, target: Tensor) -> None:
    if logits.dtype not in DTYPES or (logits.is_cuda and logits.dtype is torch.float64):
        raise ValueError(f"logits must be bfloat16, float16 or float32, got {logits.dtype}")
    if logits.dim() < 2 or logits.shape[-1] < 1:
        raise ValueError(f"logits must have shape [..., V], got {tuple(logits.shape)}")
    check_labels(target, logits.shape[:-1], logits.device)
