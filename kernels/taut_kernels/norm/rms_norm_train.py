"""RMSNorm with gradients, with or without the residual addition before it.

Maths     t = x + r (or x); t̂ = t · rstd, rstd = 1 / √(mean(t²) + ε); y = t̂ · w
          g = dy · w: dt = rstd · (g − t̂ · mean(g · t̂)) (+ the gradient of t), dx = dr = dt,
          dw = Σ dy · t̂
Ops       `taut::rms_norm_train` → y, t, rstd; `taut::rms_norm_backward` → dt, dw.
          `taut::rms_norm` (serving) updates its residual in place and has no gradient.
Shapes    x [M, N] bf16|fp16|fp32, rows at any stride, columns next to each other
          weight [N] as x or fp32, or None   residual as x, or None
          → y, t [M, N] as x, contiguous (t without elements where there is no residual); rstd [M]
          fp32; gradients of y and t as x with any strides → dt as x, contiguous; dw as the weight
Numerics  y has the bits of `taut::rms_norm` with the same tile: what is trained is what is served.
          Statistics in fp32 over the unrounded t; the backward pass reads the rounded t, is fp32 up
          to its stores, and passes over y's rounding before the weight. dw is summed in parts, one
          a program, and these in a fixed order: no atomic additions, the same bits from run to
          run on a card.
CPU       the references, in plain torch, also fp64: the specification
Limits    1 ≤ N ≤ 262144; differentiable once; sm_80 and later. Rows beyond 32768 columns are read
          again by each pass, from L2.
Source    arXiv:1910.07467, eq. 4. Blocks and code are ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from taut_kernels.launch.op_registration import register_op
from taut_kernels.norm import train_launch as norm_launch
from taut_kernels.rowwise.rows import check_epsilon, check_parameter
from taut_kernels.rowwise.training_arguments import (
    check_like,
    refuse_second_derivative,
    rows_of,
)

Optional = Tensor | None


def rms_norm_train_ref(
    x: Tensor, weight: Optional, residual: Optional, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise in plain torch: the specification, and the op's CPU implementation.

    Args:
        x: [M, N] floating point; fp64 gives fp64 without roundings.
        weight: [N] or None for 1.
        residual: as ``x``, added first; or None.
        epsilon: added to the mean square.

    Returns:
        y [M, N] as ``x``; x + residual likewise, or no elements; rstd [M] fp32 or fp64.
    """
    t = x.to(torch.promote_types(x.dtype, torch.float32))
    total = x.new_empty((0,))
    if residual is not None:
        t = t + residual.to(t.dtype)
        total = t.to(x.dtype, copy=True).contiguous()
    rstd = torch.rsqrt(t.square().mean(dim=1) + epsilon)
    y = t * rstd.unsqueeze(1)
    if weight is not None:
        y = y.to(weight.dtype) * weight
    return y.to(x.dtype).contiguous(), total, rstd


def rms_norm_backward_ref(
    dy: Tensor, dt: Optional, t: Tensor, weight: Optional, rstd: Tensor, with_dweight: bool
) -> tuple[Tensor, Tensor]:
    """Compute the gradients in plain torch: the specification of `taut::rms_norm_backward`.

    Args:
        dy: [M, N], gradient of the output.
        dt: [M, N], gradient of x + residual from elsewhere; or None.
        t: [M, N], what was normalised.
        weight: [N] or None.
        rstd: [M].
        with_dweight: whether the weight's gradient is wanted.

    Returns:
        The gradient of t [M, N] as ``t``; that of the weight [N] as it, or no elements.
    """
    wide = dy.to(rstd.dtype)
    t_hat = t.to(rstd.dtype) * rstd.unsqueeze(1)
    g = wide if weight is None else wide * weight.to(rstd.dtype)
    gradient = (g - t_hat * (g * t_hat).mean(dim=1, keepdim=True)) * rstd.unsqueeze(1)
    if dt is not None:
        gradient = gradient + dt.to(rstd.dtype)
    like = t if weight is None else weight
    dw = (wide * t_hat).sum(dim=0).to(like.dtype) if with_dweight else like.new_empty((0,))
    return gradient.to(t.dtype).contiguous(), dw


def _launch_rms_norm_train(
    x: Tensor, weight: Optional, residual: Optional, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, t, _, rstd = norm_launch.forward(x, residual, weight, None, epsilon, centred=False)
    return y, x.new_empty((0,)) if t is None else t, rstd


def _launch_rms_norm_backward(
    dy: Tensor, dt: Optional, t: Tensor, weight: Optional, rstd: Tensor, with_dweight: bool
) -> tuple[Tensor, Tensor]:
    like = t if weight is None else weight
    wants = (like.dtype if with_dweight else None, None)
    gradient, dw, _ = norm_launch.backward(dy, dt, t, weight, None, rstd, wants)
    return gradient, like.new_empty((0,)) if dw is None else dw


def _fake_rms_norm_train(
    x: Tensor, weight: Optional, residual: Optional, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x.new_empty((x.shape[0],), dtype=torch.promote_types(x.dtype, torch.float32))
    return x.new_empty(x.shape), x.new_empty((0,) if residual is None else x.shape), rstd


def _fake_rms_norm_backward(
    dy: Tensor, dt: Optional, t: Tensor, weight: Optional, rstd: Tensor, with_dweight: bool
) -> tuple[Tensor, Tensor]:
    like = t if weight is None else weight
    return t.new_empty(t.shape), like.new_empty((t.shape[1] if with_dweight else 0,))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, residual, _ = inputs
    _, t, rstd = output
    ctx.set_materialize_grads(False)
    ctx.has_residual = residual is not None
    ctx.save_for_backward(t if ctx.has_residual else x, weight, rstd)
    ctx.mark_non_differentiable(*((rstd,) if ctx.has_residual else (t, rstd)))


def _backward(ctx: Any, dy: Optional, dt: Optional, _: Optional) -> tuple[Optional, ...]:
    t, weight, rstd = ctx.saved_tensors
    with_dweight = weight is not None and ctx.needs_input_grad[1]
    gradient, dw = dt, None
    if dy is not None:
        gradient, dw = torch.ops.taut.rms_norm_backward(dy, dt, t, weight, rstd, with_dweight)
    return (
        gradient,
        dw if with_dweight else None,
        gradient if ctx.has_residual else None,
        None,
    )


def _no_second_derivative(ctx: Any, *_: Tensor) -> None:
    refuse_second_derivative("rms_norm")


_RMS_NORM_TRAIN = (
    "taut::rms_norm_train(Tensor x, Tensor? weight, Tensor? residual, float epsilon) -> "
    "(Tensor, Tensor, Tensor)"
)
register_op(_RMS_NORM_TRAIN, rms_norm_train_ref, _launch_rms_norm_train, _fake_rms_norm_train)
torch.library.register_autograd("taut::rms_norm_train", _backward, setup_context=_setup)

_RMS_NORM_BACKWARD = (
    "taut::rms_norm_backward(Tensor dy, Tensor? dt, Tensor t, Tensor? weight, Tensor rstd, bool "
    "with_dweight) -> (Tensor, Tensor)"
)
register_op(
    _RMS_NORM_BACKWARD, rms_norm_backward_ref, _launch_rms_norm_backward, _fake_rms_norm_backward
)
torch.library.register_autograd("taut::rms_norm_backward", _no_second_derivative)


def rms_norm_train(x: Tensor, weight: Optional = None, *, epsilon: float) -> Tensor:
    """Normalise rows, differentiable.

    Args:
        x: [..., N] bf16, fp16 or fp32, on the CPU also fp64; rows at one stride, columns next to
            each other.
        weight: [N] contiguous, dtype of ``x`` or fp32; None for 1.
        epsilon: added to the mean square; at least 0 and finite.

    Returns:
        [..., N] contiguous, dtype of ``x``.

    Raises:
        ValueError: a shape, dtype, device or layout the contract does not allow; names the
            argument; or ``epsilon`` outside its range.
    """
    check_epsilon(epsilon)
    rows = rows_of("x", x)
    if weight is not None:
        check_parameter("weight", weight, x)
    y, _, _ = torch.ops.taut.rms_norm_train(rows, weight, None, epsilon)
    result: Tensor = y.view(x.shape)
    return result


def add_rms_norm_train(
    x: Tensor, residual: Tensor, weight: Optional = None, *, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Add the residual and normalise the sum, differentiable; nothing is changed in place.

    Args:
        x: as for :func:`rms_norm_train`.
        residual: shape and dtype of ``x``.
        weight: as for :func:`rms_norm_train`.
        epsilon: likewise.

    Returns:
        The normalised sum, and the sum, the next residual: each [..., N] contiguous, as ``x``.

    Raises:
        ValueError: as :func:`rms_norm_train`.
    """
    check_epsilon(epsilon)
    rows = rows_of("x", x)
    residual_rows = check_like("residual", residual, x)
    if weight is not None:
        check_parameter("weight", weight, x)
    y, total, _ = torch.ops.taut.rms_norm_train(rows, weight, residual_rows, epsilon)
    return y.view(x.shape), total.view(x.shape)
