"""Int8 products that are exact on CPUs without VNNI, where oneDNN's saturate.

Without VNNI oneDNN multiplies unsigned activations (codes + 128) by signed weights and adds each
two neighbouring products in 16 bits: 255 · (w0 + w1) leaves that range where weights pass 64.
Codes up to 64 never do. So the weights are split in two halves that do not pass it, laid one behind
the other along K, and the activations are given twice: oneDNN's 32-bit sums are then those of the
whole codes, to the bit. Where oneDNN has no AVX-512 either, its int8 products are slower than fp32
ones of the same codes, which are exact below 2²⁴, and :func:`int8_gemm_cpu` multiplies those.

Maths     y[m, n] = x_scale[m] · weight_scale[n] · Σ_k (q[m, k] - azp[m]) · w[n, k] + bias[n]
Shapes    q [M, K] int8   weight [N, K] fp32 (codes)   x_scale [M, 1] or [1] fp32   weight_scale
          [N] fp32   azp [M, 1] or [1] int32 or None   bias [N] or None   →   y [M, N] of out_dtype
Numerics  integers in fp32: exact while K · 255 · 127 < 2²⁴ (K ≤ 518), beyond within 2⁻²⁴ of a
          partial sum; one rounding at the store
Source    oneDNN developer guide, "Int8 Inference: nuances of int8 computations"
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from taut_kernels.gemm.scaled_mm.operands import fake_product
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


def int8_gemm_cpu_ref(
    x_q: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    azp: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute the product; also the op's implementation. Arguments as in the contract above."""
    codes = x_q.float() if azp is None else x_q.float() - azp.float()
    y = torch.nn.functional.linear(codes, weight).mul_(x_scale).mul_(weight_scale)
    return (y if bias is None else y.add_(bias)).to(out_dtype)


_SCHEMA = (
    f"taut::{OP}(Tensor x_q, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? azp, "
    "Tensor? bias, ScalarType out_dtype) -> Tensor"
)
register_op(_SCHEMA, int8_gemm_cpu_ref, None, fake_product)
