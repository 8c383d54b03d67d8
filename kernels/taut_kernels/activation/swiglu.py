"""SiLU and the gated activations built on it, with gradients.

Maths     silu(g) = g · σ(g); swiglu: y = g · σ(αg) · (u + β), where a limit L first makes
          g = min(g, L), u = clamp(u, ±L); α = 1, β = 0 without a limit is SwiGLU, and α = 1.702,
          β = 1, L = 7 gpt-oss. With s = σ(αg): dg = dy · (u + β) · s · (1 + αg · (1 − s)),
          du = dy · g · s; 0 for what a clamp changed
Ops       `taut::silu` → y, `taut::silu_backward` → dx; `taut::swiglu` → y and
          `taut::swiglu_backward` → dg, du over two tensors; `taut::swiglu_packed` → y and
          `taut::swiglu_packed_backward` → dx over one
Shapes    gate, up [M, N] or x [M, 2N] bf16|fp16|fp32, rows at any stride, columns next to each
          other; x holds gates in its first half and ups in its second, or alternating
          (``interleaved``: gpt-oss) → y [M, N] contiguous; gradients contiguous, as the operands
Numerics  fp32; y has the bits of `taut::silu_mul`: SwiGLU rounds silu(g) to the operands' dtype
          before the product. The gradient passes over that rounding and rounds once.
CPU       the references, in plain torch, also fp64: the specification
Limits    N ≤ 262144; differentiable once; sm_80 and later
Source    SwiGLU: arXiv:2002.05202, §2. gpt-oss: vLLM `swigluoai_and_mul`. The rest is ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from taut_kernels.activation import swiglu_launch as kernels
from taut_kernels.activation.silu_mul import silu_mul_ref
from taut_kernels.launch.op_registration import register_op
from taut_kernels.rowwise.training_arguments import (
    MAX_N,
    check_like,
    refuse_second_derivative,
    rows_of,
)


def _fake_silu(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _fake_silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _fake_swiglu(gate: Tensor, up: Tensor, *_: Any) -> Tensor:
    return gate.new_empty(gate.shape)


def _fake_swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _fake_swiglu_packed(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 2))


def _fake_swiglu_packed_backward(dy: Tensor, x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _setup_silu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _backward_silu(ctx: Any, dy: Tensor) -> Tensor:
    dx: Tensor = torch.ops.taut.silu_backward(dy, *ctx.saved_tensors)
    return dx


def _setup_swiglu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.form = inputs[2:]


def _backward_swiglu(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.taut.swiglu_backward(dy, *ctx.saved_tensors, *ctx.form)
    return (*gradients, None, None, None)


def _setup_packed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.form = inputs[1:]


def _backward_packed(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx = torch.ops.taut.swiglu_packed_backward(dy, *ctx.saved_tensors, *ctx.form)
    return (dx, None, None, None, None)


def _no_second_silu(ctx: Any, *_: Tensor) -> None:
    refuse_second_derivative("silu")


def _no_second_swiglu(ctx: Any, *_: Tensor) -> None:
    refuse_second_derivative("swiglu")


def _no_second_packed(ctx: Any, *_: Tensor) -> None:
    refuse_second_derivative("swiglu_packed")


_FORM = "float alpha, float beta, float? limit"
register_op("taut::silu(Tensor x) -> Tensor", kernels.silu_ref, kernels.launch_silu, _fake_silu)
torch.library.register_autograd("taut::silu", _backward_silu, setup_context=_setup_silu)

_SILU_BACKWARD = "taut::silu_backward(Tensor dy, Tensor x) -> Tensor"
register_op(
    _SILU_BACKWARD, kernels.silu_backward_ref, kernels.launch_silu_backward, _fake_silu_backward
)
torch.library.register_autograd("taut::silu_backward", _no_second_silu)

_SWIGLU = f"taut::swiglu(Tensor gate, Tensor up, {_FORM}) -> Tensor"
register_op(_SWIGLU, kernels.swiglu_ref, kernels.launch, _fake_swiglu)
torch.library.register_autograd("taut::swiglu", _backward_swiglu, setup_context=_setup_swiglu)

_SWIGLU_BACKWARD = (
    f"taut::swiglu_backward(Tensor dy, Tensor gate, Tensor up, {_FORM}) -> (Tensor, Tensor)"
)
register_op(
    _SWIGLU_BACKWARD,
    kernels.swiglu_backward_ref,
    kernels.launch_swiglu_backward,
    _fake_swiglu_backward,
)
torch.library.register_autograd("taut::swiglu_backward", _no_second_swiglu)

_SWIGLU_PACKED = f"taut::swiglu_packed(Tensor x, {_FORM}, bool interleaved) -> Tensor"
register_op(_SWIGLU_PACKED, silu_mul_ref, kernels.launch_packed, _fake_swiglu_packed)
torch.library.register_autograd(
    "taut::swiglu_packed", _backward_packed, setup_context=_setup_packed
)

_SWIGLU_PACKED_BACKWARD = (
    f"taut::swiglu_packed_backward(Tensor dy, Tensor x, {_FORM}, bool interleaved) -> Tensor"
)
register_op(
    _SWIGLU_PACKED_BACKWARD,
    kernels.swiglu_packed_backward_ref,
    kernels.launch_swiglu_packed_backward,
    _fake_swiglu_packed_backward,
)
torch.library.register_autograd("taut::swiglu_packed_backward", _no_second_packed)


def silu(x: Tensor) -> Tensor:
    """Apply x · σ(x), differentiable.

    Args:
        x: [..., N], as ``gate`` of :func:`swiglu`.

    Returns:
        [..., N] contiguous, dtype of ``x``.

    Raises:
        ValueError: as :func:`swiglu`.
    """
    y: Tensor = torch.ops.taut.silu(rows_of("x", x))
    return y.view(x.shape)


def swiglu(
    gate: Tensor, up: Tensor, *, alpha: float = 1.0, beta: float = 0.0, limit: float | None = None
) -> Tensor:
    """Multiply activated gates by ups, differentiable.

    Args:
        gate: [..., N] bf16, fp16 or fp32, on the CPU also fp64; rows at one stride, columns next to
            each other: the halves of one tensor may be given.
        up: shape and dtype of ``gate``.
        alpha: factor inside the sigmoid (gpt-oss: 1.702).
        beta: added to the ups (gpt-oss: 1).
        limit: clamp of gates and ups (gpt-oss: 7), or None.

    Returns:
        [..., N] contiguous, dtype of ``gate``.

    Raises:
        ValueError: a shape, dtype, device or layout the contract does not allow; names the
            argument.
    """
    gates, ups = rows_of("gate", gate), check_like("up", up, gate)
    _check_limit(limit)
    y: Tensor = torch.ops.taut.swiglu(gates, ups, alpha, beta, limit)
    return y.view(gate.shape)


def swiglu_packed(
    x: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Multiply activated gates by ups that lie in one tensor, differentiable by it as a whole.

    Args:
        x: [..., 2N], as ``gate`` of :func:`swiglu`.
        alpha: as for :func:`swiglu`.
        beta: likewise.
        limit: likewise.
        interleaved: gates in even columns, ups in odd ones (gpt-oss); else halves.

    Returns:
        [..., N] contiguous, dtype of ``x``.

    Raises:
        ValueError: as :func:`swiglu`, or an odd number of columns.
    """
    rows = rows_of("x", x, 2 * MAX_N)
    if x.shape[-1] % 2:
        raise ValueError(f"x must have an even number of columns, got {x.shape[-1]}")
    _check_limit(limit)
    y: Tensor = torch.ops.taut.swiglu_packed(rows, alpha, beta, limit, interleaved)
    return y.view(*x.shape[:-1], x.shape[-1] // 2)


def _check_limit(limit: float | None) -> None:
    if limit is not None and not limit > 0:
        raise ValueError(f"limit must be positive or None, got {limit}")
