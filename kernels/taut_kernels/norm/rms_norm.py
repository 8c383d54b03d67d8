"""RMSNorm, with the residual addition before it and 8-bit quantisation behind it, in one pass.

Maths     t = x + r (or x); y = t / √(mean(t²) + ε) · w; the residual becomes t; quantised forms
          return q, s with y ≈ q · s (:mod:`taut_kernels.rowwise.row_quant`)
Ops       `taut::rms_norm` → y; `taut::rms_norm_quant` → q, scales; `taut::rms_norm_static_quant`
          → q (fp8, scale given); the two with one result have an overload `plain` without residual
Shapes    x [M, N] bf16|fp16|fp32, rows at any stride, columns next to each other
          weight [N] as x or fp32, or None   residual as x, updated in place, or None
          → y [M, N] as x; q [M, N] float8_e4m3fn|int8 and scales [M, 1] fp32; all contiguous
Numerics  statistics in fp32 over the unrounded t. y is rounded to the weight's dtype before the
          weight and to x's after it, as vLLM and transformers do; a quantised form
          quantises the y that `taut::rms_norm` returns, but for the last bit of its statistics:
          forms and tiles add the squares in orders of their own. Same bits from run to run.
CPU       the references, in plain torch: the specification
Limits    N ≤ 262144; forward only; sm_80 and later, fp8 sm_89 and later. Rows beyond 32768 columns
          are read again (from L2) by each pass.
Source    RMSNorm: arXiv:1910.07467, eq. 4. Rounding and scales: vLLM `rms_norm`,
          `rms_norm_dynamic_per_token_quant`, `rms_norm_static_fp8_quant`. The rest is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from taut_kernels.launch import early_start, launcher
from taut_kernels.launch.op_registration import register_op
from taut_kernels.norm import rms_norm_launch
from taut_kernels.rowwise import row_quant
from taut_kernels.rowwise.rows import as_rows, check_epsilon, check_parameter, check_scale

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_N = 262144


def rms_norm_ref(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, epsilon: float
) -> Tensor:
    """Normalise in plain torch: the specification, and the op's CPU implementation.

    Args:
        x: [M, N] floating point; fp64 gives fp64 without roundings, for gold results.
        weight: [N] or None for 1.
        residual: as ``x``, becomes x + residual; or None.
        epsilon: added to the mean square.

    Returns:
        [M, N] in the dtype of ``x``.
    """
    t = x.to(torch.promote_types(x.dtype, torch.float32))
    if residual is not None:
        t = t + residual.to(t.dtype)
        residual.copy_(t)
    y = t * torch.rsqrt(t.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    if weight is not None:
        y = y.to(weight.dtype) * weight
    return y.to(x.dtype)


def rms_norm_quant_ref(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Normalise, then quantise each row: the specification of `taut::rms_norm_quant`."""
    return row_quant.quantize_rows_ref(rms_norm_ref(x, weight, residual, epsilon), dtype)


def rms_norm_static_quant_ref(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, epsilon: float, scale: Tensor
) -> Tensor:
    """Normalise, then quantise by ``scale``: the specification of `taut::rms_norm_static_quant`."""
    return row_quant.quantize_static_ref(rms_norm_ref(x, weight, residual, epsilon), scale)


def _launch_rms_norm(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, epsilon: float
) -> Tensor:
    y = launcher.empty(x.shape, dtype=x.dtype, device=x.device)
    call = rms_norm_launch.call_of("same", x, weight, residual, y)
    plan = rms_norm_launch.plan("rms_norm", early_start.EARLY_TOKENS, *call)
    rms_norm_launch.run(plan, x, weight, residual, epsilon, y, None)
    return y


def _launch_rms_norm_quant(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    q = launcher.empty(x.shape, dtype=dtype, device=x.device)
    scales = launcher.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    call = rms_norm_launch.call_of(row_quant.OUT[dtype], x, weight, residual, q)
    plan = rms_norm_launch.plan("rms_norm_quant", early_start.EARLY_TOKENS, *call)
    rms_norm_launch.run(plan, x, weight, residual, epsilon, q, scales)
    return q, scales


def _launch_rms_norm_static_quant(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, epsilon: float, scale: Tensor
) -> Tensor:
    q = launcher.empty(x.shape, dtype=row_quant.FP8, device=x.device)
    call = rms_norm_launch.call_of("static_fp8", x, weight, residual, q)
    plan = rms_norm_launch.plan("rms_norm_quant", early_start.EARLY_TOKENS, *call)
    rms_norm_launch.run(plan, x, weight, residual, epsilon, q, scale)
    return q


def _fake_rms_norm(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_rms_norm_quant(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    scales = x.new_empty((x.shape[0], 1), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=rest[-1]), scales


def _fake_rms_norm_static_quant(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=row_quant.FP8)


_NORM = "Tensor x, Tensor? weight, Tensor(a!)? residual, float epsilon"
register_op(f"taut::rms_norm({_NORM}) -> Tensor", rms_norm_ref, _launch_rms_norm, _fake_rms_norm)

_RMS_NORM_QUANT = f"taut::rms_norm_quant({_NORM}, ScalarType dtype) -> (Tensor, Tensor)"
register_op(_RMS_NORM_QUANT, rms_norm_quant_ref, _launch_rms_norm_quant, _fake_rms_norm_quant)

_RMS_NORM_STATIC_QUANT = f"taut::rms_norm_static_quant({_NORM}, Tensor scale) -> Tensor"
register_op(
    _RMS_NORM_STATIC_QUANT,
    rms_norm_static_quant_ref,
    _launch_rms_norm_static_quant,
    _fake_rms_norm_static_quant,
)


def _without_residual(form: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Turn a form that takes a residual into the overload ``plain``, which has none.

    An op with one result whose only mutable operand is None breaks Inductor of torch 2.13
    ("<built-in function getitem> is not an OpOverload"): what it makes of the op expects a tuple.
    """

    def plain(x: Tensor, weight: Tensor | None, epsilon: float, *scale: Tensor) -> Tensor:
        return form(x, weight, None, epsilon, *scale)

    return plain


_PLAIN = "Tensor x, Tensor? weight, float epsilon"
register_op(
    f"taut::rms_norm.plain({_PLAIN}) -> Tensor",
    _without_residual(rms_norm_ref),
    _without_residual(_launch_rms_norm),
    _without_residual(_fake_rms_norm),
)

_STATIC_PLAIN = f"taut::rms_norm_static_quant.plain({_PLAIN}, Tensor scale) -> Tensor"
register_op(
    _STATIC_PLAIN,
    _without_residual(rms_norm_static_quant_ref),
    _without_residual(_launch_rms_norm_static_quant),
    _without_residual(_fake_rms_norm_static_quant),
)


def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, epsilon: float, residual: Tensor | None = None
) -> Tensor:
    """Normalise rows, after adding the residual where there is one.

    Args:
        x: [..., N] bf16, fp16 or fp32; rows at one stride, columns next to each other.
        weight: [N] contiguous, dtype of ``x`` or fp32; None for 1.
        epsilon: added to the mean square; at least 0 and finite.
        residual: shape and dtype of ``x``; becomes x + residual.

    Returns:
        [..., N] contiguous, dtype of ``x``.

    Raises:
        ValueError: a shape, dtype, device or layout the contract does not allow; names the
            argument; or ``epsilon`` outside its range.
    """
    rows, residual_rows = _check(x, weight, residual, epsilon)
    op = torch.ops.taut.rms_norm
    if residual_rows is None:
        y: Tensor = op.plain(rows, weight, epsilon)
    else:
        y = op.default(rows, weight, residual_rows, epsilon)
    return y.view(x.shape)


def rms_norm_quant(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    epsilon: float,
    residual: Tensor | None = None,
    dtype: torch.dtype = row_quant.FP8,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalise rows and quantise them.

    Args:
        x: as for :func:`rms_norm`.
        weight: likewise.
        epsilon: likewise.
        residual: likewise.
        dtype: `torch.float8_e4m3fn` or `torch.int8`.
        scale: one fp32 element: static quantisation (fp8 only); None: one scale a row.

    Returns:
        Values [..., N] of ``dtype`` and scales: [..., 1] fp32, or ``scale`` itself.

    Raises:
        ValueError: as :func:`rms_norm`, or a format the device or the op does not have.
    """
    rows, residual_rows = _check(x, weight, residual, epsilon)
    if reason := row_quant.why_not_supported(dtype, x.device):
        raise ValueError(reason)
    if scale is not None:
        if dtype is not row_quant.FP8:
            raise ValueError(f"scale is for dtype torch.float8_e4m3fn only, got {dtype}")
        check_scale(scale, x)
        op = torch.ops.taut.rms_norm_static_quant
        if residual_rows is None:
            static: Tensor = op.plain(rows, weight, epsilon, scale)
        else:
            static = op.default(rows, weight, residual_rows, epsilon, scale)
        return static.view(x.shape), scale
    q, scales = torch.ops.taut.rms_norm_quant.default(rows, weight, residual_rows, epsilon, dtype)
    return q.view(x.shape), scales.view(*x.shape[:-1], 1)


def _check(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor | None]:
    check_epsilon(epsilon)
    rows = as_rows("x", x, DTYPES, MAX_N)
    if weight is not None:
        check_parameter("weight", weight, x)
    if residual is None:
        return rows, None
    if residual.shape != x.shape or residual.dtype is not x.dtype or residual.device != x.device:
        wanted = f"{tuple(x.shape)} {x.dtype} on {x.device}"
        found = f"{tuple(residual.shape)} {residual.dtype} on {residual.device}"
        raise ValueError(f"residual must be {wanted}, got {found}")
    return rows, as_rows("residual", residual, DTYPES, MAX_N)
