"""W4A16 GEMM: ``y = x @ dequant(qweight) + bias``, weights in 4 bits, activations in bf16 or fp16.

Maths     y[m, n] = Σ_k x[m, k] · (q[k, n] - z[k // G, n]) · s[k // G, n] + bias[n];
          z = 8 where symmetric
Shapes    x [..., K] bf16|fp16, any strides   qweight [16·ceil(K/128), N] int32
          scales [K/G, N] as x   zero_points [K/G, N] uint8 or None   bias [N] as x or None
          → y [..., N] as x, contiguous
Packing   :mod:`taut_kernels.formats`, "GPU kernel layout"; on disk compressed-tensors
          ``pack-quantized``, repacked once after loading by
          :func:`taut_kernels.formats.repack_weight` and its neighbours
Numerics  q - z is an integer and exact in either type; products accumulate in fp32 within a group,
          the group's scale and the bias are applied in fp32, one rounding at the store. The
          reference multiplies in the order of the formula, in fp32 (fp64 for fp64 inputs). Not
          bitwise equal across tiles.
CPU       `taut::w4a16_gemm` on CPU tensors runs :func:`w4a16_gemm_ref`, the specification. It
          dequantises on every call (≈ 600 µs for 1536×576, README), so a CPU worker uses
          :mod:`taut_kernels.gemm.w4a16_cpu` instead.
Limits    G in {32, 64, 128} or K (one group a channel), K % G == 0, K % 16 == 0; forward only;
          sm_80 and later
Source    Integers with a scale (and zero point) a group: GPTQ, arXiv:2210.17323. The rest is ours.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from taut_kernels import _launch, formats, tiles
from taut_kernels._variant import KernelVariant

OP = "w4a16_gemm"
GROUP_SIZES = (32, 64, 128)
DTYPES = (torch.float16, torch.bfloat16)


def w4a16_gemm_ref(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    """Compute the product in plain torch: the specification, and the op's CPU implementation.

    Args:
        x: [M, K] floating point; fp64 gives an fp64 result, everything else accumulates in fp32.
        qweight: [16 * ceil(K/128), N] int32, kernel layout.
        scales: [K/G, N] floating point.
        zero_points: [K/G, N] uint8 in 0..15, or None for 8 everywhere.
        bias: [N] or None.
        group_size: G.

    Returns:
        [M, N] in the dtype of ``x``.
    """
    accumulator = torch.promote_types(x.dtype, torch.float32)
    K, (groups, N) = x.shape[1], scales.shape
    q = formats.unpack_qweight(qweight, K).view(groups, group_size, N).to(accumulator)
    zero = formats.SYMMETRIC_ZERO if zero_points is None else zero_points.to(accumulator)[:, None]
    weight = (q - zero) * scales.to(accumulator)[:, None]
    y = x.to(accumulator) @ weight.view(K, N)
    if bias is not None:
        y = y + bias.to(accumulator)
    return y.to(x.dtype)


@triton.jit(do_not_specialize=["M"])  # type: ignore[untyped-decorator]
def _w4a16_gemm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [M, K]
    qweight_ptr,  # [16 * ceil(K/128), N] int32, contiguous
    scales_ptr,  # [num_groups, N], contiguous
    zero_points_ptr,  # [num_groups, N] uint8, contiguous; unused without HAS_ZERO_POINTS
    bias_ptr,  # [N]; unused without HAS_BIAS
    y_ptr,  # [M, N], contiguous
    M,
    N,
    K,
    num_groups,
    group_size,
    stride_xm,
    stride_xk,
    HAS_ZERO_POINTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RUNS_PER_SCALE: tl.constexpr,  # runs of 16 K indices that share a scale: 2, 4 or 8
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # formats.RUN and formats.NIBBLES_PER_WORD: a jit function cannot read module globals.
    RUN: tl.constexpr = 16
    RUNS: tl.constexpr = 8
    # Neighbouring programs share their weights, which outweigh the activations, in L2.
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, RUN)
    mask_m = offs_m < M
    mask_n = offs_n < N
    # int64 before the multiplications: M·stride and K·N pass 2**31 on long prompts and large
    # layers.
    x_rows = x_ptr + offs_m[:, None].to(tl.int64) * stride_xm
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)

    for block in range(tl.cdiv(K, RUN * RUNS)):
        k_block = block * RUN * RUNS
        word_rows = (block * RUN + offs_r).to(tl.int64)[:, None] * N
        words = tl.load(qweight_ptr + word_rows + offs_n[None, :], mask=mask_n[None, :], other=0)
        for share in tl.static_range(RUNS // RUNS_PER_SCALE):
            partial = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            # The last block may reach beyond K, hence beyond the last group; x is 0 there.
            group = (k_block + share * RUNS_PER_SCALE * RUN) // group_size
            group = tl.minimum(group, num_groups - 1)
            group_row = group.to(tl.int64) * N
            zero = tl.full((BLOCK_N,), 8, dtype=tl.int32)
            if HAS_ZERO_POINTS:
                zero = tl.load(zero_points_ptr + group_row + offs_n, mask=mask_n, other=8)
                zero = zero.to(tl.int32)
            for step in tl.static_range(RUNS_PER_SCALE):
                run = share * RUNS_PER_SCALE + step
                offs_k = k_block + run * RUN + offs_r
                x = tl.load(
                    x_rows + offs_k[None, :].to(tl.int64) * stride_xk,
                    mask=mask_m[:, None] & (offs_k[None, :] < K),
                    other=0.0,
                )
                q = ((words >> (4 * run)) & 0xF) - zero[None, :]
                partial = tl.dot(x, q.to(x.dtype), partial, input_precision="ieee")
            scale = tl.load(scales_ptr + group_row + offs_n, mask=mask_n, other=0.0)
            acc += partial * scale.to(tl.float32)[None, :]

    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + offs_m[:, None].to(tl.int64) * N + offs_n[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


def _runs_per_scale(group_size: int) -> int:
    return min(group_size, formats.K_BLOCK) // formats.RUN if group_size in GROUP_SIZES else 8


def _launch_w4a16_gemm(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    (M, K), (num_groups, N) = x.shape, scales.shape
    y = _launch.empty((M, N), dtype=x.dtype, device=x.device)
    if M == 0:
        return y
    tile = tiles.lookup(OP, _launch.gpu_name(x.device), M)
    grid = (triton.cdiv(M, tile.block_m), triton.cdiv(N, tile.block_n))
    _w4a16_gemm_kernel[grid](
        x,
        qweight,
        scales,
        zero_points,
        bias,
        y,
        M,
        N,
        K,
        num_groups,
        group_size,
        x.stride(0),
        x.stride(1),
        HAS_ZERO_POINTS=zero_points is not None,
        HAS_BIAS=bias is not None,
        RUNS_PER_SCALE=_runs_per_scale(group_size),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y


def _fake_w4a16_gemm(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], scales.shape[1]))


torch.library.define(
    f"taut::{OP}",
    "(Tensor x, Tensor qweight, Tensor scales, Tensor? zero_points, Tensor? bias, int group_size)"
    " -> Tensor",
)
torch.library.impl(f"taut::{OP}", "CPU", w4a16_gemm_ref)
torch.library.impl(f"taut::{OP}", "CUDA", _launch_w4a16_gemm)
torch.library.register_fake(f"taut::{OP}", _fake_w4a16_gemm)


def why_not_supported(K: int, group_size: int, dtype: torch.dtype) -> str | None:
    """Say why this op does not apply to a layer.

    Args:
        K: input features of the layer's shard.
        group_size: weights a scale covers along K, -1 for one group a channel.
        dtype: of the activations.

    Returns:
        A reason, or None where the op applies.
    """
    if dtype not in DTYPES:
        return f"activations must be float16 or bfloat16, got {str(dtype).removeprefix('torch.')}"
    if K % formats.RUN:
        return f"input features must be a multiple of {formats.RUN}, got {K}"
    if group_size not in (-1, K):
        if group_size not in GROUP_SIZES:
            return f"group size must be 32, 64, 128 or one group a channel, got {group_size}"
        if K % group_size:
            return f"group size {group_size} does not divide the {K} input features"
    return None


def w4a16_gemm(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None = None,
    *,
    group_size: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply activations by 4-bit weights.

    Args:
        x: [..., K] fp16 or bf16 activations, any strides.
        qweight: [16 * ceil(K/128), N] int32, contiguous, from
            :func:`taut_kernels.formats.repack_weight`.
        scales: [K/G, N] contiguous, dtype of ``x``.
        zero_points: [K/G, N] uint8 contiguous in 0..15, or None for a symmetric layer.
        group_size: G in {32, 64, 128}, or -1 (or K) for one group a channel.
        bias: [N] contiguous, dtype of ``x``, or None.

    Returns:
        [..., N] in the dtype of ``x``.

    Raises:
        ValueError: a shape, dtype, device or layout the contract does not allow; names the
            argument.
    """
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension")
    K = x.shape[-1]
    if reason := why_not_supported(K, group_size, x.dtype):
        raise ValueError(reason)
    group = K if group_size == -1 else group_size
    _check_operands(x, K, group, qweight, scales, zero_points, bias)
    y: torch.Tensor = torch.ops.taut.w4a16_gemm(
        x.reshape(-1, K), qweight, scales, zero_points, bias, group
    )
    return y.view(*x.shape[:-1], scales.shape[1])


def _check_operands(
    x: torch.Tensor,
    K: int,
    group_size: int,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, scales, bias)
    ):
        raise ValueError("w4a16_gemm is forward only: call it under torch.no_grad()")
    if scales.dim() != 2:
        raise ValueError(f"scales must have two dimensions, got {scales.dim()}")
    N, groups = scales.shape[1], K // group_size
    rows = -(-K // formats.K_BLOCK) * formats.RUN
    operands: list[tuple[str, torch.Tensor | None, tuple[int, ...], torch.dtype]] = [
        ("qweight", qweight, (rows, N), torch.int32),
        ("scales", scales, (groups, N), x.dtype),
        ("zero_points", zero_points, (groups, N), torch.uint8),
        ("bias", bias, (N,), x.dtype),
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


def kernel_variants() -> Iterator[KernelVariant]:
    """Yield every specialisation a serving process can reach, for ahead-of-time compilation."""
    for tile in tiles.load(OP).every_tile():
        for dtype in ("fp16", "bf16"):
            for has_zero_points in (False, True):
                for runs in (2, 4, 8):
                    yield _variant(tile, dtype, has_zero_points, runs)


def _variant(tile: tiles.TileConfig, dtype: str, has_zero_points: bool, runs: int) -> KernelVariant:
    pointers = {"x_ptr": dtype, "qweight_ptr": "i32", "scales_ptr": dtype, "y_ptr": dtype}
    optional = {"zero_points_ptr": "u8"} if has_zero_points else {}
    return KernelVariant(
        label=f"{OP} {dtype} {'asym' if has_zero_points else 'sym'} group={runs * formats.RUN}",
        kernel=_w4a16_gemm_kernel,
        tile=tile,
        pointers=pointers | optional | {"bias_ptr": dtype},
        integers=("M", "N", "K", "num_groups", "group_size", "stride_xm"),
        divisible_by_16=("N", "K", "group_size", "stride_xm"),
        constants={
            "stride_xk": 1,
            "HAS_ZERO_POINTS": has_zero_points,
            "HAS_BIAS": True,
            "RUNS_PER_SCALE": runs,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
        }
        | ({} if has_zero_points else {"zero_points_ptr": None}),
    )
