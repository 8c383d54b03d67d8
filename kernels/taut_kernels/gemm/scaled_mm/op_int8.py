"""W8A8 GEMM in int8: ``y = s_x · s_w · (x @ weightᵀ - azp · azp_adj) + bias``.

Maths     y[m, n] = (Σ_k x[m, k] · w[n, k] - azp[m] · azp_adj[n]) · s_w[n] · s_x[m] + bias[n];
          without ``azp``, ``azp_adj`` itself is subtracted (a static zero point folded into it);
          without ``azp_adj``, nothing is
Shapes    x [..., K] int8   weight [N, K] int8, stride_wk = 1, rows 16-byte aligned
          x_scale [M] (any shape of M elements) or one element, fp32   weight_scale [N] or one
          azp_adj [N] int32 or None   azp [M] int32 or None   bias [N] out_dtype or None
          arrivals [2 · ceil(N/64)] int32, 0 before and after every call, or None
          → y [..., N] bf16|fp16, contiguous
Packing   none: vLLM's and compressed-tensors' ``int-quantized`` weights as they lie on disk
Numerics  sums and zero points in int32, exact (K < 65536 keeps them below 2**31), hence the same
          bits for every tile and split; scales and bias in fp32, one rounding at the store
Limits    K % 16 == 0, K < 65536; forward only; sm_80 and later (tiles fed by TMA: sm_90).
          ``arrivals`` belongs to the layer: two calls on one layer must not overlap in time on two
          streams. Without it an op call refuses a tile that splits K.
CPU       :func:`w8a8_gemm_ref`, the specification
Source    azp and azp_adj are those of vLLM's ``cutlass_scaled_mm_azp``; the integer product with
          scales applied afterwards is arXiv:1712.05877, §2.2. The kernels are ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm import operands
from taut_kernels.gemm.scaled_mm.dispatch import launch, make_arrivals
from taut_kernels.gemm.scaled_mm.operands import fake_product
from taut_kernels.launch import launcher
from taut_kernels.launch.op_registration import register_op

__all__ = ["make_arrivals", "w8a8_gemm", "w8a8_gemm_ref", "why_not_supported"]

OP = "w8a8_gemm"
MAX_K = 65535
"""128 · 128 · K and 128 · (128 · K) together stay below 2**31."""


def w8a8_gemm_ref(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    azp_adj: Tensor | None,
    azp: Tensor | None,
    bias: Tensor | None,
    arrivals: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute the product in plain torch: the specification, and the op's CPU implementation.

    Args:
        x: [M, K] int8.
        weight: [N, K] int8.
        x_scale: M elements or one; fp64 gives fp64 arithmetic, for gold results.
        weight_scale: N elements or one.
        azp_adj: [N] int32 or None.
        azp: M elements, int32, or None.
        bias: [N] or None.
        arrivals: not used here.
        out_dtype: of the result; fp64 is allowed here.

    Returns:
        [M, N].
    """
    # Exact: every product and sum is an integer below 2**53.
    sums = x.double() @ weight.double().t()
    if azp_adj is not None:
        adjustment = azp_adj.double().view(1, -1)
        sums = sums - (adjustment if azp is None else azp.double().view(-1, 1) * adjustment)
    accumulator = torch.promote_types(x_scale.dtype, torch.float32)
    y = sums.to(accumulator) * weight_scale.to(accumulator).view(1, -1)
    y = y * x_scale.to(accumulator).view(-1, 1)
    if bias is not None:
        y = y + bias.to(accumulator)
    return y.to(out_dtype)


def _launch_w8a8_gemm(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    (M, K), N = x.shape, weight.shape[0]
    tile = tiles_scaled_mm.lookup(OP, launcher.gpu_name(x.device), N, K, M).tile
    return launch(tile, x, weight, *rest)


_SCHEMA = (
    f"taut::{OP}(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? azp_adj, "
    "Tensor? azp, Tensor? bias, Tensor? arrivals, ScalarType out_dtype) -> Tensor"
)
register_op(_SCHEMA, w8a8_gemm_ref, _launch_w8a8_gemm, fake_product)


def why_not_supported(K: int) -> str | None:
    """Say why this op does not apply to a layer with K input features, None where it does."""
    if K > MAX_K:
        return f"input features must be at most {MAX_K} (int32 sums), got {K}"
    return operands.why_no_layout(K)


def w8a8_gemm(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    *,
    azp_adj: Tensor | None = None,
    azp: Tensor | None = None,
    bias: Tensor | None = None,
    arrivals: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Multiply int8 activations by int8 weights.

    Args:
        x: [..., K] int8, any strides; copied where rows are not 16-byte aligned.
        weight: [N, K] int8, K contiguous, rows 16-byte aligned.
        x_scale: fp32, contiguous, one element or one a token.
        weight_scale: fp32, contiguous, one element or one a channel.
        azp_adj: int32, N elements: the sum of each channel's weights, times the zero point where
            that is static; None for symmetric activations.
        azp: int32, one a token: the zero points, or None where they are in ``azp_adj``.
        bias: [N] contiguous, ``out_dtype``, or None.
        arrivals: the layer's :func:`make_arrivals`; None makes one for this call.
        out_dtype: bf16 or fp16.

    Returns:
        [..., N] in ``out_dtype``.

    Raises:
        ValueError: a shape, dtype, device or layout the contract does not allow; names the
            argument.
    """
    N, K = operands.check_matrices(x, weight, torch.int8)
    if reason := why_not_supported(K):
        raise ValueError(f"weight: {reason}")
    operands.check_out_dtype(out_dtype)
    rows = x.reshape(-1, K)
    M = rows.shape[0]
    for name, vector, sizes, dtype in (
        ("x_scale", x_scale, (M, 1), torch.float32),
        ("weight_scale", weight_scale, (N, 1), torch.float32),
        ("azp_adj", azp_adj, (N,), torch.int32),
        ("azp", azp, (M,), torch.int32),
        ("bias", bias, (N,), out_dtype),
    ):
        operands.check_vector(name, vector, sizes, dtype, x.device)
    if azp is not None and azp_adj is None:
        raise ValueError("azp needs azp_adj, the sums of the weights")
    operands.check_arrivals(arrivals, N, x.device)
    operands.check_no_gradient(OP, x_scale, weight_scale, bias)
    arrivals = make_arrivals(N, x.device) if arrivals is None else arrivals
    y: Tensor = torch.ops.taut.w8a8_gemm.default(
        rows, weight, x_scale, weight_scale, azp_adj, azp, bias, arrivals, out_dtype
    )
    return y.view(*x.shape[:-1], N)
