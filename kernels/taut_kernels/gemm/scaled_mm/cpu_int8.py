"""Int8 products that are exact on CPUs without VNNI, where oneDNN's saturate.

Without VNNI oneDNN multiplies unsigned activations (codes + 128) by signed weights and adds each
two neighbouring products in 16 bits: 255 · (w0 + w1) leaves that range where weights pass 64.
Codes up to 64 never do. So the weights are split in two halves that do not pass it, laid one behind
the other along K, and the activations are given twice: oneDNN's 32-bit sums are then those of the
whole codes, to the bit. Where oneDNN has no AVX-512 either, its int8 products are slower than fp32
ones of the same codes, which are exact below 2²⁴, and ``taut::int8_gemm_cpu`` multiplies those. Its
weights lie in fp16, which holds every code, where FBGEMM multiplies fp32 by fp16 (x86 with AVX2);
elsewhere in fp32, at twice the bytes.

Maths     y[m, n] = x_scale[m] · weight_scale[n] · Σ_k (q[m, k] - azp[m]) · w[n, k] + bias[n]
Shapes    q [M, K] int8   weight as :func:`pack_codes` gives it   x_scale [M, 1] or [1] fp32
          weight_scale [N] fp32   azp [M, 1] or [1] int32 or None   bias [N] or None   →   y [M, N]
          of out_dtype
Numerics  integers in fp32: exact while K · 255 · 127 < 2²⁴ (K ≤ 518), beyond within 2⁻²⁴ of a
          partial sum; one rounding at the store
Source    oneDNN developer guide, "Int8 Inference: nuances of int8 computations"; the product of
          fp32 and fp16 is FBGEMM's (PyTorch, BSD-3)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from taut_kernels.launch.op_registration import register_op

OP = "int8_gemm_cpu"
MOST_EXACT = 64
"""Largest magnitude of a weight's code whose pairs of products fit 16 bits: 2 · 255 · 64 < 2¹⁵."""
_KNOWN_SHAPE = (4, 32, 64)
_TOLERANCE = 1e-3


def split_codes(weight: Tensor) -> Tensor:
    """Split int8 codes in two halves of at most :data:`MOST_EXACT` each, one behind the other.

    Args:
        weight: [N, K] int8.

    Returns:
        [N, 2K] int8; columns k and K + k add up to the code in column k.
    """
    low = weight >> 1  # rounds down: -64 to 63
    return torch.cat((low, weight - low), dim=1)


def int8_product_error(multiply: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Multiply a known pair that saturates 16-bit sums, and compare with integers.

    Args:
        multiply: takes int8 codes x [M, K] and w [N, K]; returns x · wᵀ, [M, N], in fp32.

    Returns:
        Norm of the error over the norm of the product; 0 where every sum is exact.
    """
    M, N, K = _KNOWN_SHAPE
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-127, 128, (M, K), generator=generator, dtype=torch.int8)
    w = torch.randint(-127, 128, (N, K), generator=generator, dtype=torch.int8)
    x[0], w[0] = 127, 127  # every pair passes 16 bits here
    exact = x.double() @ w.double().T
    error = multiply(x, w).double() - exact
    return float(error.norm() / exact.norm())


def is_exact(error: float) -> bool:
    """Say whether an error of :func:`int8_product_error` is rounding (fp32, bf16 scales) only."""
    return error < _TOLERANCE


def multiplies_fp16() -> bool:
    """Say whether FBGEMM multiplies fp32 by fp16 here."""
    supported = "fbgemm" in torch.backends.quantized.supported_engines
    return supported and hasattr(torch.ops._quantized, "wrapped_fbgemm_pack_gemm_matrix_fp16")


def pack_codes(weight: Tensor) -> Tensor:
    """Lay int8 codes out for ``taut::int8_gemm_cpu``.

    Args:
        weight: [N, K] int8.

    Returns:
        FBGEMM's handle of them in fp16, uint8, where it multiplies those: it is gone with this
        tensor, and a copy of it is none. Else [N, K] fp32.
    """
    codes = weight.float()
    if not multiplies_fp16():
        return codes
    handle: Tensor = torch.ops._quantized.wrapped_fbgemm_pack_gemm_matrix_fp16(codes)
    return handle


def int8_gemm_cpu_ref(
    x_q: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    azp: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute the product of fp32 codes, [N, K]; other arguments as in the contract above."""
    codes = x_q.float() if azp is None else x_q.float() - azp.float()
    y = torch.nn.functional.linear(codes, weight).mul_(x_scale).mul_(weight_scale)
    return (y if bias is None else y.add_(bias)).to(out_dtype)


def _int8_gemm_cpu(
    x_q: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    azp: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    if weight.dtype is torch.float32:
        return int8_gemm_cpu_ref(x_q, weight, x_scale, weight_scale, azp, bias, out_dtype)
    codes = x_q.float() if azp is None else x_q.float() - azp.float()
    N = weight_scale.shape[0]
    y: Tensor = torch.ops._quantized.wrapped_fbgemm_linear_fp16_weight(codes, weight, None, N)
    y.mul_(x_scale).mul_(weight_scale)
    return (y if bias is None else y.add_(bias)).to(out_dtype)


def _fake_int8_gemm_cpu(
    x_q: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, *rest: Any
) -> Tensor:
    return x_q.new_empty((x_q.shape[0], weight_scale.shape[0]), dtype=rest[-1])


_SCHEMA = (
    f"taut::{OP}(Tensor x_q, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? azp, "
    "Tensor? bias, ScalarType out_dtype) -> Tensor"
)
register_op(_SCHEMA, _int8_gemm_cpu, None, _fake_int8_gemm_cpu)
