"""LayerNorm, forward and backward.

Maths     x̂ = (x − mean x) · rstd, rstd = 1 / √(mean (x − mean x)² + ε); y = x̂ · w + b
          g = dy · w: dx = rstd · (g − mean g − x̂ · mean(g · x̂)), dw = Σ dy · x̂, db = Σ dy
Ops       `taut::layer_norm` → y, mean, rstd; `taut::layer_norm_backward` → dx, dw, db
Shapes    x [M, N] bf16|fp16|fp32, rows at any stride, columns next to each other
          weight, bias [N] of one dtype, that of x or fp32; both, the weight alone, or neither
          → y [M, N] as x, contiguous; mean, rstd [M] fp32; dy as x with any strides
          → dx as x, contiguous; dw, db as the weight, or without elements where not wanted
Numerics  fp32, one rounding at each store; the variance is of the differences, not of the squares.
          dw and db are summed in parts, one a program, and these in a fixed order: no atomic
          additions, the same bits from run to run on a card.
CPU       the references, in plain torch, also fp64: the specification
Limits    1 ≤ N ≤ 262144; differentiable once; sm_80 and later. A row beyond 32768 columns
          (backward: 16384) is read again by each pass, from L2.
Source    arXiv:1607.06450, eq. 4. Blocks and code are ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from taut_kernels.launch.op_registration import register_op
from taut_kernels.norm import train_launch as norm_launch
from taut_kernels.rowwise.rows import check_epsilon, check_parameter
from taut_kernels.rowwise.training_arguments import (
    refuse_second_derivative,
    rows_of,
)

Triple = tuple[Tensor, Tensor, Tensor]


def layer_norm_ref(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Triple:
    """Normalise in plain torch: the specification, and the op's CPU implementation.

    Args:
        x: [M, N] floating point; fp64 gives fp64.
        weight: [N] or None for 1.
        bias: [N] or None for 0.
        epsilon: added to the variance.

    Returns:
        y [M, N] as ``x``; mean and rstd [M] fp32 or fp64.
    """
    t = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = t.mean(dim=1)
    y = t - mean.unsqueeze(1)
    rstd = torch.rsqrt(y.square().mean(dim=1) + epsilon)
    y = y * rstd.unsqueeze(1)
    if weight is not None:
        y = y * weight.to(t.dtype)
    if bias is not None:
        y = y + bias.to(t.dtype)
    return y.to(x.dtype).contiguous(), mean, rstd


def layer_norm_backward_ref(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    with_dweight: bool,
    with_dbias: bool,
) -> Triple:
    """Compute the gradients in plain torch: the specification of `taut::layer_norm_backward`.

    Args:
        dy: [M, N], gradient of the output.
        x: [M, N].
        weight: [N] or None.
        mean: [M].
        rstd: [M].
        with_dweight: whether the weight's gradient is wanted.
        with_dbias: whether the bias's is.

    Returns:
        dx [M, N] as ``x``; dw and db [N] as ``weight``, or without elements.
    """
    wide = dy.to(rstd.dtype)
    x_hat = (x.to(rstd.dtype) - mean.unsqueeze(1)) * rstd.unsqueeze(1)
    g = wide if weight is None else wide * weight.to(rstd.dtype)
    inner = g - g.mean(dim=1, keepdim=True) - x_hat * (g * x_hat).mean(dim=1, keepdim=True)
    dx = (inner * rstd.unsqueeze(1)).to(x.dtype).contiguous()
    like = x if weight is None else weight
    dw = (wide * x_hat).sum(dim=0).to(like.dtype) if with_dweight else like.new_empty((0,))
    db = wide.sum(dim=0).to(like.dtype) if with_dbias else like.new_empty((0,))
    return dx, dw, db


def _launch_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> Triple:
    y, _, mean, rstd = norm_launch.forward(x, None, weight, bias, epsilon, centred=True)
    assert mean is not None
    return y, mean, rstd


def _launch_layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    with_dweight: bool,
    with_dbias: bool,
) -> Triple:
    like = x if weight is None else weight
    wants = (like.dtype if with_dweight else None, like.dtype if with_dbias else None)
    dx, dw, db = norm_launch.backward(dy, None, x, weight, mean, rstd, wants)
    first, second = (like.new_empty((0,)) if found is None else found for found in (dw, db))
    return dx, first, second


def _fake_layer_norm(x: Tensor, *_: Any) -> Triple:
    statistics = torch.promote_types(x.dtype, torch.float32)
    rows = (x.shape[0],)
    mean, rstd = x.new_empty(rows, dtype=statistics), x.new_empty(rows, dtype=statistics)
    return x.new_empty(x.shape), mean, rstd


def _fake_layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    with_dweight: bool,
    with_dbias: bool,
) -> Triple:
    like = x if weight is None else weight
    dw = like.new_empty((x.shape[1] if with_dweight else 0,))
    return x.new_empty(x.shape), dw, like.new_empty((x.shape[1] if with_dbias else 0,))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Triple) -> None:
    x, weight, bias, _ = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.has_bias = bias is not None
    ctx.mark_non_differentiable(mean, rstd)


def _backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    wants = (
        weight is not None and ctx.needs_input_grad[1],
        ctx.has_bias and ctx.needs_input_grad[2],
    )
    dx, dw, db = torch.ops.taut.layer_norm_backward(dy, x, weight, mean, rstd, *wants)
    return dx, dw if wants[0] else None, db if wants[1] else None, None


def _no_second_derivative(ctx: Any, *_: Tensor) -> None:
    refuse_second_derivative("layer_norm")


_LAYER_NORM = (
    "taut::layer_norm(Tensor x, Tensor? weight, Tensor? bias, float epsilon) -> (Tensor, "
    "Tensor, Tensor)"
)
register_op(_LAYER_NORM, layer_norm_ref, _launch_layer_norm, _fake_layer_norm)
torch.library.register_autograd("taut::layer_norm", _backward, setup_context=_setup)

_LAYER_NORM_BACKWARD = (
    "taut::layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, "
    "bool with_dweight, bool with_dbias) -> (Tensor, Tensor, Tensor)"
)
register_op(
    _LAYER_NORM_BACKWARD,
    layer_norm_backward_ref,
    _launch_layer_norm_backward,
    _fake_layer_norm_backward,
)
torch.library.register_autograd("taut::layer_norm_backward", _no_second_derivative)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, epsilon: float
) -> Tensor:
    """Normalise rows by mean and variance, differentiable.

    Args:
        x: [..., N] bf16, fp16 or fp32, on the CPU also fp64; rows at one stride, columns next to
            each other.
        weight: [N] contiguous, dtype of ``x`` or fp32; None for 1.
        bias: [N] contiguous, dtype of ``weight``, which it needs; None for 0.
        epsilon: added to the variance; at least 0 and finite.

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
    if bias is not None:
        check_parameter("bias", bias, x)
        if weight is None or bias.dtype is not weight.dtype:
            found = None if weight is None else weight.dtype
            raise ValueError(f"bias needs a weight of its dtype {bias.dtype}, got {found}")
    y, _, _ = torch.ops.taut.layer_norm(rows, weight, bias, epsilon)
    result: Tensor = y.view(x.shape)
    return result
