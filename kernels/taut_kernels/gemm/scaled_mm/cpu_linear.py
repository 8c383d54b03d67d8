"""W8A8 on a CPU in one op: rows quantised, codes multiplied exactly, results scaled.

For one token a product reads each weight once and does little with it, so the floor is bytes over
the bandwidth of a core. Two instruction sets: AVX-512 with VNNI multiplies unsigned activations
(codes + 128) by signed weights in 32 bits, and AVX2 multiplies 16-bit codes and adds pairs in 32
bits. Neither saturates, so both are exact for every code, -128 included.

Maths     q[m, k] = clamp(round(x[m, k] / s[m]) + z[m], -128, 127)
          y[m, n] = s[m] · weight_scale[n] · Σ_k (q[m, k] - z[m]) · w[n, k] + bias[n]
          dynamic: s = max |x| / 127, z = 0; asymmetric: s = (max - min) / 255, z = round(-128 - min
          / s); a row of zeros, or of one value if asymmetric, has s = 0: y is the bias
Shapes    x [M, K] bf16   weight [⌈N/16⌉, ⌈K/4⌉, 16, 4] int8 (:func:`pack`)   weight_scale [N] fp32
          sums [N] int32, Σ_k w[n, k]   bias [N] bf16 or None   input_scale [1] fp32 and input_zero
          [1] int32, static, or None   →   y [M, N] bf16
Numerics  32-bit integers; fp32 from there on: two products, a sum; one rounding at the store. NaN
          in a row makes the row NaN.
Limits    x86 with AVX2, K ≤ 65,536, contiguous operands, forward only; compiled by g++ where it
          runs (:mod:`taut_kernels.launch.cpp_library`), else :func:`why_not_here` says why not
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from taut_kernels.launch import cpp_library
from taut_kernels.launch.op_registration import register_op

OP = "int8_linear_cpu"
MOST_FEATURES = 65536
"""Input features whose sums, 255 · 128 each, stay within 32 bits."""
SOURCE = Path(__file__).with_suffix(".cpp")
_BLOCK, _QUAD = 16, 4


def why_not_here() -> str | None:
    """Compile and load the op; say why it cannot run in this process, None where it can."""
    if not torch.cpu._is_avx2_supported():
        return "this CPU has no AVX2"
    return cpp_library.load(SOURCE)


def has_vnni() -> bool:
    """Say whether AVX-512 with VNNI multiplies here; ``ATEN_CPU_CAPABILITY=avx2`` denies it."""
    allowed = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return bool(allowed and torch.cpu._is_vnni_supported())


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Lay weights out for the op.

    Args:
        weight: [N, K] int8.

    Returns:
        The weights in blocks, padded with zeros, and the sums of their rows.

    Raises:
        ValueError: another type or number of dimensions, or more than :data:`MOST_FEATURES`.
    """
    if weight.dtype is not torch.int8 or weight.dim() != 2:
        raise ValueError(f"weight must be [N, K] int8, got {weight.dtype} {tuple(weight.shape)}")
    N, K = weight.shape
    if not 0 < K <= MOST_FEATURES:
        raise ValueError(f"weight must have 1 to {MOST_FEATURES} input features, got {K}")
    whole = pad(weight, (0, -K % _QUAD, 0, -N % _BLOCK))
    blocks = whole.view(-1, _BLOCK, whole.shape[1] // _QUAD, _QUAD).transpose(1, 2)
    return blocks.contiguous(), weight.sum(1, dtype=torch.int32)


def int8_linear_cpu_ref(
    x: Tensor,
    codes: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    input_scale: Tensor | None = None,
    input_zero: Tensor | None = None,
    *,
    symmetric: bool = True,
) -> Tensor:
    """Compute the op from the weights' codes [N, K]; other arguments as in the contract above."""
    wide = x.float()
    zero = torch.zeros(1) if input_zero is None else input_zero.float()
    if input_scale is not None:
        scale = input_scale
    elif symmetric:
        scale = wide.abs().amax(1, keepdim=True) / 127
    else:
        low, high = wide.amin(1, keepdim=True), wide.amax(1, keepdim=True)
        scale = (high - low) / 255
        zero = torch.where(scale > 0, torch.round(-128 - low / scale), 0.0)
    divisor = torch.where(scale > 0, scale, 1.0)
    q = (torch.round(wide / divisor) + zero).clamp(-128, 127)
    sums = (q - zero).double() @ codes.double().T
    y = sums.float() * scale * weight_scale
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _fake(x: Tensor, weight: Tensor, weight_scale: Tensor, *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight_scale.shape[0]))


_SCHEMA = (
    f"taut::{OP}(Tensor x, Tensor weight, Tensor weight_scale, Tensor sums, Tensor? bias, Tensor? "
    "input_scale, Tensor? input_zero, bool symmetric, bool vnni) -> Tensor"
)
register_op(_SCHEMA, None, None, _fake)
