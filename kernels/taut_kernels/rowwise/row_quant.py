"""Symmetric quantisation of a row (a token) to 8 bits, as vLLM's fused kernels define it.

Maths     dynamic: s = max(max_i |y_i| / q_max, s_min), q_i = round(y_i / s); static: s is given
Formats   float8_e4m3fn: q_max 448, s_min 1 / (448 · 512), q = clamp(y / s); int8: q_max 127,
          s_min 2**-23 (fp32 epsilon), q = saturate(round_half_even(y · (1 / s)))
Numerics  all in fp32. fp8 divides by a dynamic scale and multiplies by the reciprocal of a static
          one; int8 multiplies by the reciprocal. y is what the unfused op would have stored:
          rounded to the activations' dtype first. The jit division of an fp32 y is one
          multiplication and one Newton step, which gives the correctly rounded quotient
          (Markstein, 1990) wherever the quotient does not vanish in e4m3; a negative zero may come
          out as zero. That of a 16-bit y multiplies with 1 / s in two parts, one instruction less:
          the same e4m3 values for every y and largest y there are (the tests try all), but in
          rows that reach beyond 2**120, where the second part is subnormal.
Limits    a row with an infinity or a NaN has meaningless values; other rows do not see it
Source    definition: vLLM `rms_norm_dynamic_per_token_quant`, `static_scaled_fp8_quant`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from taut_kernels.rowwise.packed_jit import wide

FP8, INT8 = torch.float8_e4m3fn, torch.int8
Q_MAX = {FP8: 448.0, INT8: 127.0}
MIN_SCALE = {FP8: 1.0 / (448.0 * 512.0), INT8: 2.0**-23}
OUT = {FP8: "fp8", INT8: "int8"}
"""How the jit functions call a dynamic format; ``static_fp8`` and ``same`` are the other forms."""


def quantize_rows_ref(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise each row by its largest magnitude: the specification.

    Args:
        y: [M, N] floating point.
        dtype: `torch.float8_e4m3fn` or `torch.int8`.

    Returns:
        Values [M, N] of ``dtype`` and scales [M, 1] fp32; y ≈ values · scales.
    """
    y = y.float()
    largest = y.abs().amax(dim=1, keepdim=True) if y.shape[1] else y.new_zeros(y.shape[0], 1)
    # By a tensor: torch multiplies by the reciprocal of a number on CUDA.
    scales = (largest / torch.full_like(largest, Q_MAX[dtype])).clamp(min=MIN_SCALE[dtype])
    if dtype is INT8:
        return (y * (1.0 / scales)).round().clamp(-128, 127).to(INT8), scales
    return (y / scales).clamp(-448.0, 448.0).to(FP8), scales


def quantize_static_ref(y: Tensor, scale: Tensor) -> Tensor:
    """Quantise to fp8 by a given scale: the specification.

    Args:
        y: [M, N] floating point.
        scale: one fp32 element.

    Returns:
        [M, N] `torch.float8_e4m3fn`.
    """
    return (y.float() * (1.0 / scale)).clamp(-448.0, 448.0).to(FP8)


def why_not_supported(dtype: torch.dtype, device: torch.device) -> str | None:
    """Say why a device cannot store a quantised format; None where it can.

    Args:
        dtype: `torch.float8_e4m3fn` or `torch.int8`.
        device: where the result goes.
    """
    if dtype not in OUT:
        return f"dtype must be torch.float8_e4m3fn or torch.int8, got {dtype}"
    if dtype is FP8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "dtype torch.float8_e4m3fn needs compute capability 8.9 or later"
    return None


@triton.jit  # type: ignore[untyped-decorator]
def row_scale(largest, OUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scale of each row from its largest magnitude [ROWS] fp32."""
    if OUT == "int8":
        scale = tl.maximum(tl.div_rn(largest, 127.0), 1.1920928955078125e-07)
    else:
        scale = tl.maximum(tl.div_rn(largest, 448.0), 4.359654017857143e-06)
    return scale


@triton.jit  # type: ignore[untyped-decorator]
def quantize(y, scale, reciprocal, OUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Quantise values of 16 or 32 bits; scale and reciprocal broadcast against them.

    For fp8 the result is fp32, still to be rounded by the caller's cast to the
    output's type: under the interpreter of Triton 3.9 that cast loses carries (1.97 becomes 1.0),
    so that interpreter tests give the kernel an fp32 output and let torch round.
    """
    narrow: tl.constexpr = y.dtype != tl.float32
    y = wide(y)
    quotient = y * reciprocal
    # A row's own scale bounds its quotients by q_max and a rounding: only a given scale needs the
    # clamp.
    if OUT == "int8":
        # 1.5 · 2**23: the sum's low byte is the integer, rounded half to even.
        q = (quotient + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    elif OUT == "fp8":
        # The scale is negated, not the quotient: it is one for a row.
        if narrow:
            error = tl.fma(-scale, reciprocal, 1.0) * reciprocal
            q = tl.fma(y, reciprocal, y * error)
        else:
            q = tl.fma(tl.fma(quotient, -scale, y), reciprocal, quotient)
    else:
        q = tl.minimum(tl.maximum(quotient, -448.0), 448.0)
    return q
