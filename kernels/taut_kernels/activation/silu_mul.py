"""Gated SiLU activation of an MLP, with 8-bit quantisation behind it, in one pass.

Maths     x = [g | u]: y = g · σ(αg) · (u + β); α = 1, β = 0 without a limit is SiLU·mul.
          With a limit L first g = min(g, L), u = clamp(u, ±L). gpt-oss has α = 1.702, β = 1, L = 7:
          with h = g/2 that is s·u + s, s = h·tanh(αh) + h. Quantised forms return q, s with
          y ≈ q · s (:mod:`taut_kernels.rowwise.row_quant`)
Ops       `taut::silu_mul` → y; `taut::silu_mul_quant` → q, scales; `taut::silu_mul_static_quant`
          → q (fp8, scale given)
Shapes    x [M, 2N] bf16|fp16|fp32, rows at any stride, columns next to each other: gates in the
          first half, ups in the second, or alternating (``interleaved``: gpt-oss)
          → y [M, N] as x; q [M, N] float8_e4m3fn|int8 and scales [M, 1] fp32; all contiguous
Numerics  fp32; SiLU·mul rounds silu(g) to x's dtype before the product and the product after it, as
          vLLM and transformers do; the other forms round once. A quantised form quantises exactly
          the y that `taut::silu_mul` returns. Same bits from run to run.
CPU       the references, in plain torch: the specification
Limits    N ≤ 262144; forward only; sm_80 and later, fp8 sm_89 and later
Source    SwiGLU: arXiv:2002.05202, §2. gpt-oss: vLLM `swigluoai_and_mul`. The rest is ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from taut_kernels.activation import silu_mul_launch
from taut_kernels.launch import early_start, launcher
from taut_kernels.launch.op_registration import register_op
from taut_kernels.rowwise import row_quant
from taut_kernels.rowwise.rows import as_rows, check_scale

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_N = 262144


def silu_mul_ref(
    x: Tensor, alpha: float, beta: float, limit: float | None, interleaved: bool
) -> Tensor:
    """Activate in plain torch: the specification, and the op's CPU implementation.

    Args:
        x: [M, 2N] floating point; fp64 gives fp64 without roundings, for gold results.
        alpha: factor inside the sigmoid.
        beta: added to the ups.
        limit: clamp of gates (above) and ups (both sides), or None.
        interleaved: gates in even columns, ups in odd ones; else halves.

    Returns:
        [M, N] in the dtype of ``x``.
    """
    N = x.shape[1] // 2
    halves = (x[:, ::2], x[:, 1::2]) if interleaved else (x[:, :N], x[:, N:])
    gate, up = (half.to(torch.promote_types(x.dtype, torch.float32)) for half in halves)
    if (alpha, beta, limit) == (1.0, 0.0, None):
        return (torch.nn.functional.silu(gate).to(x.dtype).to(up.dtype) * up).to(x.dtype)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + beta)).to(x.dtype)


def silu_mul_quant_ref(
    x: Tensor, alpha: float, beta: float, limit: float | None, interleaved: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Activate, then quantise each row: the specification of `taut::silu_mul_quant`."""
    return row_quant.quantize_rows_ref(silu_mul_ref(x, alpha, beta, limit, interleaved), dtype)


def silu_mul_static_quant_ref(
    x: Tensor, alpha: float, beta: float, limit: float | None, interleaved: bool, scale: Tensor
) -> Tensor:
    """Activate, then quantise by ``scale``: the specification of `taut::silu_mul_static_quant`."""
    return row_quant.quantize_static_ref(silu_mul_ref(x, alpha, beta, limit, interleaved), scale)


def _launch_silu_mul(
    x: Tensor, alpha: float, beta: float, limit: float | None, interleaved: bool
) -> Tensor:
    (M, columns), dtype, device = x.shape, x.dtype, x.device
    N, early = columns // 2, early_start.EARLY_TOKENS
    y = launcher.empty((M, N), dtype=dtype, device=device)
    call = ("same", M, N, dtype, dtype, device)
    plan = silu_mul_launch.plan("silu_mul", early, *call, alpha, beta, limit, interleaved)
    silu_mul_launch.run(plan, x, alpha, beta, limit, y, None)
    return y


def _launch_silu_mul_quant(
    x: Tensor, alpha: float, beta: float, limit: float | None, interleaved: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    (M, columns), device = x.shape, x.device
    N, early = columns // 2, early_start.EARLY_TOKENS
    q = launcher.empty((M, N), dtype=dtype, device=device)
    scales = launcher.empty((M, 1), dtype=torch.float32, device=device)
    call = (row_quant.OUT[dtype], M, N, x.dtype, dtype, device)
    plan = silu_mul_launch.plan("silu_mul_quant", early, *call, alpha, beta, limit, interleaved)
    silu_mul_launch.run(plan, x, alpha, beta, limit, q, scales)
    return q, scales


def _launch_silu_mul_static_quant(
    x: Tensor, alpha: float, beta: float, limit: float | None, interleaved: bool, scale: Tensor
) -> Tensor:
    (M, columns), device = x.shape, x.device
    N, early = columns // 2, early_start.EARLY_TOKENS
    q = launcher.empty((M, N), dtype=row_quant.FP8, device=device)
    call = ("static_fp8", M, N, x.dtype, row_quant.FP8, device)
    plan = silu_mul_launch.plan("silu_mul", early, *call, alpha, beta, limit, interleaved)
    silu_mul_launch.run(plan, x, alpha, beta, limit, q, scale)
    return q


def _fake_silu_mul(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 2))


def _fake_silu_mul_quant(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    q = x.new_empty((x.shape[0], x.shape[1] // 2), dtype=rest[-1])
    return q, x.new_empty((x.shape[0], 1), dtype=torch.float32)


def _fake_silu_mul_static_quant(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 2), dtype=row_quant.FP8)


_ACTIVATION = "Tensor x, float alpha, float beta, float? limit, bool interleaved"
register_op(
    f"taut::silu_mul({_ACTIVATION}) -> Tensor", silu_mul_ref, _launch_silu_mul, _fake_silu_mul
)

_SILU_MUL_QUANT = f"taut::silu_mul_quant({_ACTIVATION}, ScalarType dtype) -> (Tensor, Tensor)"
register_op(_SILU_MUL_QUANT, silu_mul_quant_ref, _launch_silu_mul_quant, _fake_silu_mul_quant)

_SILU_MUL_STATIC_QUANT = f"taut::silu_mul_static_quant({_ACTIVATION}, Tensor scale) -> Tensor"
register_op(
    _SILU_MUL_STATIC_QUANT,
    silu_mul_static_quant_ref,
    _launch_silu_mul_static_quant,
    _fake_silu_mul_static_quant,
)


def silu_mul(
    x: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Multiply activated gates by ups.

    Args:
        x: [..., 2N] bf16, fp16 or fp32; rows at one stride, columns next to each other.
        alpha: factor inside the sigmoid (gpt-oss: 1.702).
        beta: added to the ups (gpt-oss: 1).
        limit: clamp of gates and ups (gpt-oss: 7), or None.
        interleaved: gates in even columns, ups in odd ones (gpt-oss); else halves.

    Returns:
        [..., N] contiguous, dtype of ``x``.

    Raises:
        ValueError: a shape, dtype or layout the contract does not allow; names the argument.
    """
    rows = _check(x, limit)
    y: Tensor = torch.ops.taut.silu_mul.default(rows, alpha, beta, limit, interleaved)
    return y.view(*x.shape[:-1], x.shape[-1] // 2)


def silu_mul_quant(
    x: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
    dtype: torch.dtype = row_quant.FP8,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Multiply activated gates by ups and quantise the rows.

    Args:
        x: as for :func:`silu_mul`.
        alpha: likewise.
        beta: likewise.
        limit: likewise.
        interleaved: likewise.
        dtype: `torch.float8_e4m3fn` or `torch.int8`.
        scale: one fp32 element: static quantisation (fp8 only); None: one scale a row.

    Returns:
        Values [..., N] of ``dtype`` and scales: [..., 1] fp32, or ``scale`` itself.

    Raises:
        ValueError: as :func:`silu_mul`, or a format the device or the op does not have.
    """
    rows = _check(x, limit)
    if reason := row_quant.why_not_supported(dtype, x.device):
        raise ValueError(reason)
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    if scale is not None:
        if dtype is not row_quant.FP8:
            raise ValueError(f"scale is for dtype torch.float8_e4m3fn only, got {dtype}")
        check_scale(scale, x)
        static: Tensor = torch.ops.taut.silu_mul_static_quant.default(
            rows, alpha, beta, limit, interleaved, scale
        )
        return static.view(shape), scale
    q, scales = torch.ops.taut.silu_mul_quant.default(rows, alpha, beta, limit, interleaved, dtype)
    return q.view(shape), scales.view(*x.shape[:-1], 1)


def _check(x: Tensor, limit: float | None) -> Tensor:
    rows = as_rows("x", x, DTYPES, 2 * MAX_N)
    if x.shape[-1] % 2:
        raise ValueError(f"x must have an even number of columns, got {x.shape[-1]}")
    if limit is not None and not limit > 0:
        raise ValueError(f"limit must be positive or None, got {limit}")
    return rows
