"""FP8 GEMM: ``y = (s_x · x) @ (s_w · weight)ᵀ + bias`` in e4m3, scales by tensor, channel or block.

Maths     y[m, n] = s_w[n] · s_x[m] · Σ_k x[m, k] · w[n, k] + bias[n]; block-wise
          y[m, n] = Σ_g s_x[m, g] · s_w[n // 128, g] · Σ_{k in g} x[m, k] · w[n, k] + bias[n],
          g = k // 128
Shapes    x [..., K] e4m3   weight [N, K] e4m3, stride_wk = 1, rows 16-byte aligned
          x_scale one element, or [M] (any shape of M elements); block-wise [M, ceil(K/128)], any
          strides   weight_scale one element, or [N]; block-wise [ceil(N/128), ceil(K/128)]; all
          fp32   bias [N] out_dtype or None
          arrivals [2 · ceil(N/64)] int32, 0 before and after every call, or None
          → y [..., N] bf16|fp16, contiguous
Packing   none: vLLM's and compressed-tensors' ``float-quantized`` weights as they lie on disk
Numerics  Hopper's FP8 tensor cores add with about 14 bits (as CUTLASS with fast accumulation does);
          block-wise that holds within 128 products only, the rest is fp32. Scales and bias in fp32,
          one rounding at the store. For one tile, the same bits from run to run.
Limits    K % 16 == 0; forward only; sm_90 (Triton has no e4m3 before sm_89). ``arrivals`` as in
          :mod:`.op_int8`.
CPU       :func:`fp8_gemm_ref`, the specification
Source    e4m3: arXiv:2209.05433; 128×128 blocks with 1×128 groups: DeepSeek-V3, arXiv:2412.19437,
          §3.3.2. The kernels are ours.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm import operands
from taut_kernels.gemm.scaled_mm.dispatch import launch, launch_block, make_arrivals
from taut_kernels.gemm.scaled_mm.operands import fake_product
from taut_kernels.gemm.scaled_mm.tile import BLOCK_GROUP
from taut_kernels.launch import launcher
from taut_kernels.launch.autocast import without_autocast
from taut_kernels.launch.op_registration import register_op

__all__ = ["fp8_gemm", "fp8_gemm_ref", "make_arrivals", "why_not_supported"]

OP = "fp8_gemm"
BLOCK_OP = "fp8_block"
DTYPE = torch.float8_e4m3fn


def is_block_wise(weight: Tensor, weight_scale: Tensor) -> bool:
    """Say whether scales belong to 128×128 blocks of [N, K] weights, judged by their shape."""
    N, K = weight.shape
    if weight_scale.numel() in (1, N):
        return False
    return tuple(weight_scale.shape) == (-(-N // BLOCK_GROUP), -(-K // BLOCK_GROUP))


def fp8_gemm_ref(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    arrivals: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute the product in plain torch: the specification, and the op's CPU implementation.

    Args:
        x: [M, K] e4m3.
        weight: [N, K] e4m3.
        x_scale: one element, M elements, or [M, ceil(K/128)]; fp64 gives fp64 arithmetic.
        weight_scale: one element, N elements, or [ceil(N/128), ceil(K/128)].
        bias: [N] or None.
        arrivals: not used here.
        out_dtype: of the result; fp64 is allowed here.

    Returns:
        [M, N].
    """
    accumulator = torch.promote_types(x_scale.dtype, torch.float32)
    values, weights = x.to(accumulator), weight.to(accumulator)
    s_x, s_w = x_scale.to(accumulator), weight_scale.to(accumulator)
    if is_block_wise(weight, weight_scale):
        N, K = weight.shape
        s_w = s_w.repeat_interleave(BLOCK_GROUP, 0)[:N].repeat_interleave(BLOCK_GROUP, 1)[:, :K]
        s_x = s_x.repeat_interleave(BLOCK_GROUP, 1)[:, :K]
        y = (values * s_x) @ (weights * s_w).t()
    else:
        y = values @ weights.t() * s_w.view(1, -1) * s_x.view(-1, 1)
    if bias is not None:
        y = y + bias.to(accumulator)
    return y.to(out_dtype)


@cache
def _why_not_on(device: torch.device) -> str | None:
    """Say why a device cannot run the kernels; None where it can, as the interpreter on a CPU."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return f"x must be on a GPU of compute capability 8.9 or later, {device} has {capability}"
    return None


def _launch_fp8_gemm(
    x: Tensor, weight: Tensor, x_scale: Tensor, w_scale: Tensor, *rest: Any
) -> Tensor:
    if reason := _why_not_on(x.device):
        raise ValueError(reason)
    (M, K), N = x.shape, weight.shape[0]
    gpu = launcher.gpu_name(x.device)
    if is_block_wise(weight, w_scale):
        tile = tiles_scaled_mm.lookup(BLOCK_OP, gpu, N, K, M).tile
        return launch_block(tile, x, weight, x_scale, w_scale, *rest)
    tile = tiles_scaled_mm.lookup(OP, gpu, N, K, M).tile
    return launch(tile, x, weight, x_scale, w_scale, None, None, *rest)


_SCHEMA = (
    f"taut::{OP}(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? bias, "
    "Tensor? arrivals, ScalarType out_dtype) -> Tensor"
)
register_op(_SCHEMA, without_autocast(fp8_gemm_ref), _launch_fp8_gemm, fake_product)


def why_not_supported(K: int) -> str | None:
    """Say why this op does not apply to a layer with K input features, None where it does."""
    return operands.why_no_layout(K)


def fp8_gemm(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    *,
    bias: Tensor | None = None,
    arrivals: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Multiply e4m3 activations by e4m3 weights.

    Args:
        x: [..., K] e4m3, any strides; copied where rows are not 16-byte aligned.
        weight: [N, K] e4m3, K contiguous, rows 16-byte aligned.
        x_scale: fp32: one element or one a token, contiguous; with block-wise weights
            [M, ceil(K/128)], any strides.
        weight_scale: fp32, contiguous: one element, one a channel, or [ceil(N/128), ceil(K/128)].
        bias: [N] contiguous, ``out_dtype``, or None.
        arrivals: the layer's :func:`make_arrivals`; None makes one for this call.
        out_dtype: bf16 or fp16.

    Returns:
        [..., N] in ``out_dtype``.

    Raises:
        ValueError: a shape, dtype, device or layout the contract does not allow; names the
            argument.
    """
    N, K = operands.check_matrices(x, weight, DTYPE)
    if reason := why_not_supported(K):
        raise ValueError(f"weight: {reason}")
    operands.check_out_dtype(out_dtype)
    rows = x.reshape(-1, K)
    _check_scales(x_scale, weight, weight_scale, rows.shape[0])
    operands.check_vector("bias", bias, (N,), out_dtype, x.device)
    operands.check_arrivals(arrivals, N, x.device)
    operands.check_no_gradient(OP, x_scale, weight_scale, bias)
    arrivals = make_arrivals(N, x.device) if arrivals is None else arrivals
    y: Tensor = torch.ops.taut.fp8_gemm.default(
        rows, weight, x_scale, weight_scale, bias, arrivals, out_dtype
    )
    return y.view(*x.shape[:-1], N)


def _check_scales(x_scale: Tensor, weight: Tensor, weight_scale: Tensor, M: int) -> None:
    N, K = weight.shape
    device = weight.device
    if not is_block_wise(weight, weight_scale):
        operands.check_vector("weight_scale", weight_scale, (N, 1), torch.float32, device)
        operands.check_vector("x_scale", x_scale, (M, 1), torch.float32, device)
        return
    operands.check_vector(
        "weight_scale", weight_scale, (weight_scale.numel(),), torch.float32, device
    )
    shape = (M, -(-K // BLOCK_GROUP))
    if tuple(x_scale.shape) != shape:
        raise ValueError(
            f"x_scale must have shape {shape} with block-wise weights, got {tuple(x_scale.shape)}"
        )
    if x_scale.dtype is not torch.float32:
        raise ValueError(f"x_scale must be torch.float32, got {x_scale.dtype}")
    if x_scale.device != device:
        raise ValueError(f"x_scale must be on {device}, got {x_scale.device}")
