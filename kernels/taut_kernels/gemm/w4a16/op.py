"""W4A16 GEMM: ``y = x @ dequant(qweight) + bias``, weights in 4 bits, activations in bf16 or fp16.

Maths     y[m, n] = Σ_k x[m, k] · (q[n, k] - z[n, k // G]) · s[n, k // G] + bias[n];
          z = 8 where symmetric
Shapes    x [M, K] bf16|fp16   qweight [N/16, K/64, 32, 4] int32
          scales [N/16, ceil(K/G/4), 8, 4, 2] as x   zeros [N/16, ceil(K/G/4), 8] int32 or None
          bias [N] as x or None
          arrivals [N/16] int32, 0 before and after every call   → y [M, N] as x, contiguous
Packing   :mod:`.layout`; on disk compressed-tensors ``pack-quantized``, repacked
          once after loading
Regimes   M ≤ 8, and to 16 where it was measured faster, :mod:`.decode`,
          bound by weight bytes; from there :mod:`.portable`; where a measured
          table or, on Hopper, the cost model says so
          :mod:`.decode_ring` (to 64),
          :mod:`.ring`,
          :mod:`.pair` or :mod:`.dense`. One
          layout serves them all.
Numerics  q - z is an integer and exact in either type; products accumulate in fp32, bias is applied
          in fp32, one rounding at the store. Scales: see the kernel. The reference multiplies in
          the order of the formula, in fp32. The same bits from run to run for one M; not across M.
CPU       `taut::w4a16_gemm` on CPU tensors runs :func:`w4a16_gemm_ref`, the specification; a CPU
          worker uses :mod:`.cpu` instead.
Limits    G in {32, 64, 128} or K (one group a channel), K % G == 0, N % 16 == 0 (rows of an MMA),
          K % 64 == 0 (a lane's 16-byte load); forward only; sm_80 and later. ``arrivals`` belongs
          to the layer: two calls on one layer must not overlap in time on two streams. On sm_90
          weights are read before the kernel in front has ended: it must not be what writes them.
Source    Integers with a scale (and zero point) a group: GPTQ, arXiv:2210.17323. The rest is ours.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from taut_kernels.gemm.w4a16 import disk as formats
from taut_kernels.gemm.w4a16 import dispatch as w4a16_launch
from taut_kernels.gemm.w4a16 import layout as formats_mma
from taut_kernels.gemm.w4a16.plan import Call, Runs, Weight
from taut_kernels.launch import launcher
from taut_kernels.launch.autocast import without_autocast
from taut_kernels.launch.op_registration import register_op

OP = "w4a16_gemm"
GROUP_SIZES = (32, 64, 128)
DTYPES = (torch.float16, torch.bfloat16)


def w4a16_gemm_ref(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    arrivals: Tensor,
    group_size: int,
) -> Tensor:
    """Compute the product in plain torch: the specification, and the op's CPU implementation.

    Args:
        x: [M, K] float16 or bfloat16; accumulates in fp32.
        qweight: [N/16, K/64, 32, 4] int32.
        scales: [N/16, quads, 8, 4, 2].
        zeros: [N/16, quads, 8] int32, or None for 8 everywhere.
        bias: [N] or None.
        arrivals: [N/16] int32, not used here.
        group_size: G.

    Returns:
        [M, N] in the dtype of ``x``.
    """
    groups = x.shape[1] // group_size
    q = formats_mma.unpack_weight(qweight).float()
    N, K = q.shape
    zero = torch.full((N, groups), float(formats.SYMMETRIC_ZERO), device=x.device)
    if zeros is not None:
        zero = formats_mma.stored_zero_points(zeros, groups).float()
    scale = formats_mma.unpair_rows(scales, groups).float()
    weight = (q.view(N, groups, group_size) - zero.unsqueeze(-1)) * scale.unsqueeze(-1)
    y = x.float() @ weight.view(N, K).t()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


# Asked in every call: kept by everything the answer follows from.
@lru_cache(maxsize=8192)
def _plan(
    M: int,
    N: int,
    K: int,
    group_size: int,
    dtype: torch.dtype,
    device: torch.device,
    has_zeros: bool,
    has_bias: bool,
) -> Runs:
    """Return how to run a call: by the tile the tables or their rule choose."""
    call = Call(M, N, K, group_size, dtype, device, has_zeros, has_bias)
    return w4a16_launch.plan(w4a16_launch.chosen(call), call)


def _launch_w4a16_gemm(x: Tensor, *given: Any) -> Tensor:
    weight, group_size = Weight(*given[:-1]), given[-1]
    M, K = x.shape
    N = 16 * weight.qweight.shape[0]
    if M == 0:
        return launcher.empty((M, N), dtype=x.dtype, device=x.device)
    x = launcher.aligned(x)
    has_zeros, has_bias = weight.zeros is not None, weight.bias is not None
    plan = _plan(M, N, K, group_size, x.dtype, x.device, has_zeros, has_bias)
    return plan.run(x, weight)


def _fake_w4a16_gemm(x: Tensor, qweight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], 16 * qweight.shape[0]))


_SCHEMA = (
    f"taut::{OP}(Tensor x, Tensor qweight, Tensor scales, Tensor? zeros, Tensor? bias, Tensor "
    "arrivals, int group_size) -> Tensor"
)
register_op(_SCHEMA, without_autocast(w4a16_gemm_ref), _launch_w4a16_gemm, _fake_w4a16_gemm)


def why_not_supported(N: int, K: int, group_size: int, dtype: torch.dtype) -> str | None:
    """Say why this op does not apply to a layer.

    Args:
        N: output features of the layer's shard.
        K: input features of the layer's shard.
        group_size: weights a scale covers along K, -1 for one group a channel.
        dtype: of the activations.

    Returns:
        A reason, or None where the op applies.
    """
    return why_no_scheme(K, group_size, dtype) or formats_mma.why_no_layout(N, K)


def why_no_scheme(K: int, group_size: int, dtype: torch.dtype) -> str | None:
    """Say why a quantisation scheme has no W4A16 kernel here, on any device.

    Args:
        K: input features of the layer's shard.
        group_size: weights a scale covers along K, -1 for one group a channel.
        dtype: of the activations.
    """
    if dtype not in DTYPES:
        return f"activations must be float16 or bfloat16, got {str(dtype).removeprefix('torch.')}"
    if group_size not in (-1, K):
        if group_size not in GROUP_SIZES:
            return f"group size must be 32, 64, 128 or one group a channel, got {group_size}"
        if K % group_size:
            return f"group size {group_size} does not divide the {K} input features"
    return None


def make_arrivals(N: int, device: torch.device) -> Tensor:
    """Allocate a layer's ``arrivals``: [N/16] int32 zeros, kept as long as the layer."""
    return torch.zeros(N // formats_mma.ROW_TILE, dtype=torch.int32, device=device)


def w4a16_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    group_size: int,
    arrivals: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply activations by 4-bit weights.

    Args:
        x: [..., K] fp16 or bf16, any strides; copied where rows are not 16-byte aligned.
        qweight: [N/16, K/64, 32, 4] int32, from :func:`formats_mma.repack_weight`.
        scales: [N/16, quads, 8, 4, 2], dtype of ``x``, from :func:`formats_mma.repack_scale`.
        zeros: [N/16, quads, 8] int32, from :func:`formats_mma.repack_zero_point`, or None for a
            symmetric layer.
        group_size: G in {32, 64, 128}, or -1 (or K) for one group a channel.
        arrivals: the layer's :func:`make_arrivals`.
        bias: [N] contiguous, dtype of ``x``, or None.

    Returns:
        [..., N] in the dtype of ``x``.

    Raises:
        ValueError: a shape, dtype, device or layout the contract does not allow; names the
            argument.
    """
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension")
    if qweight.dim() != 4:
        raise ValueError(f"qweight must have four dimensions, got {qweight.dim()}")
    K, N = x.shape[-1], 16 * qweight.shape[0]
    if reason := why_no_scheme(K, group_size, x.dtype):
        raise ValueError(f"{'group_size' if x.dtype in DTYPES else 'x'}: {reason}")
    if reason := formats_mma.why_no_layout(N, K):
        raise ValueError(f"x and qweight: {reason}")
    group = K if group_size == -1 else group_size
    _check_operands(x, N, K, group, qweight, scales, zeros, bias, arrivals)
    y: Tensor = torch.ops.taut.w4a16_gemm.default(
        x.reshape(-1, K), qweight, scales, zeros, bias, arrivals, group
    )
    return y.view(*x.shape[:-1], N)


def _check_operands(
    x: Tensor,
    N: int,
    K: int,
    group_size: int,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    arrivals: Tensor,
) -> None:
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, scales, bias)
    ):
        raise ValueError("w4a16_gemm is forward only: call it under torch.no_grad()")
    quads = -(-K // group_size // formats_mma.GROUPS_PER_QUAD)
    operands: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype]] = [
        ("qweight", qweight, (N // 16, K // 64, 32, 4), torch.int32),
        ("scales", scales, (N // 16, quads, 8, 4, 2), x.dtype),
        ("zeros", zeros, (N // 16, quads, 8), torch.int32),
        ("bias", bias, (N,), x.dtype),
        ("arrivals", arrivals, (N // 16,), torch.int32),
    ]
    for name, tensor, shape, dtype in operands:
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        if tensor.dtype is not dtype:
            raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on {x.device}, got {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
