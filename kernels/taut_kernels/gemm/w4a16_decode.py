"""W4A16 GEMM for at most 16 tokens: ``y = x @ dequant(qweight) + bias``, bound by weight bytes.

Maths     as :mod:`taut_kernels.gemm.w4a16`: y[m, n] = Σ_k x[m, k] · (q[n, k] - z) · s + bias[n]
Shapes    x [M, K] bf16|fp16, 1 ≤ M ≤ 16   qweight [N/16, K/64, 32, 4] int32
          scales, zeros [N/16, ceil(K/G/4), 8, 4, 2] as x   bias [N] as x or None
          arrivals [N/16] int32, 0 before and after every call   → y [M, N] as x, contiguous
Packing   :mod:`taut_kernels.formats_decode`; repacked once after loading
Numerics  q - z is an integer and exact in either type; products accumulate in fp32 within a group,
          scale and bias are applied in fp32, one rounding at the store. For one tile, the same bits
          from run to run: K-warps and splits are added in a fixed order.
Limits    N % 16 == 0 (rows of an MMA), K % 64 == 0 (a lane's 16-byte load), G in {32, 64, 128} or
          K; forward only; sm_80 and later. ``arrivals`` belongs to the layer: two calls on one
          layer must not overlap in time on two streams.
Source    `mma.m16n8k16` with weights as the 16-row operand, so that tokens pad to 8 and not to 64;
          integer weights with a scale a group: GPTQ, arXiv:2210.17323. The rest is ours.
"""

from __future__ import annotations

import torch
import triton

from taut_kernels import _launch, formats_decode, tiles_decode
from taut_kernels.gemm import w4a16
from taut_kernels.gemm._w4a16_decode_jit import w4a16_decode_kernel

OP = "w4a16_decode"
MAX_M = 16
_ELEMENT = {torch.bfloat16: "bf16", torch.float16: "f16"}


def w4a16_decode_ref(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    arrivals: torch.Tensor,
    group_size: int,
) -> torch.Tensor:
    """Compute the product in plain torch: the specification, and the op's CPU implementation.

    Args:
        x: [M, K] float16 or bfloat16; accumulates in fp32.
        qweight: [N/16, K/64, 32, 4] int32.
        scales: [N/16, quads, 8, 4, 2].
        zeros: as ``scales``, or None for 8 everywhere.
        bias: [N] or None.
        arrivals: [N/16] int32, not used here.
        group_size: G.

    Returns:
        [M, N] in the dtype of ``x``.
    """
    groups = x.shape[1] // group_size
    q = formats_decode.unpack_weight(qweight).float()
    N, K = q.shape
    zero = torch.full((N, groups), 8.0, device=x.device)
    if zeros is not None:
        zero = formats_decode.stored_zero_points(zeros, groups).float()
    scale = formats_decode.unpair_rows(scales, groups).float()
    weight = (q.view(N, groups, group_size) - zero.unsqueeze(-1)) * scale.unsqueeze(-1)
    y = x.float() @ weight.view(N, K).t()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def launch_constants(
    tile: tiles_decode.DecodeTile, K: int, token_tiles: int, group_size: int
) -> dict[str, int | bool]:
    """Return the kernel constants that follow from tile and shape; ``group_size`` 0: a channel."""
    return {
        "K": K,
        "GROUP_SIZE": group_size,
        "TOKEN_TILES": token_tiles,
        "ROW_WARPS": tile.row_warps,
        "K_WARPS": tile.k_warps,
        "SPLIT_K": tile.split_k,
        "DEPTH": tile.depth,
        "X_DEPTH": tile.x_depth,
        "BATCH": tile.batch,
        "FENCE": tile.fence,
    }


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` itself where each row can be read 16 bytes at a time, else a copy."""
    if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.contiguous() if not x.is_contiguous() else x.clone()


def launch(
    tile: tiles_decode.DecodeTile,
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    arrivals: torch.Tensor,
    group_size: int,
) -> torch.Tensor:
    """Run the kernel with a given tile; what the op does after the look-up, and what tuning calls.

    Args:
        tile: how to cut the work.
        x: [M, K], 0 ≤ M ≤ 16.
        qweight: as in the module's contract.
        scales: likewise.
        zeros: likewise.
        bias: likewise.
        arrivals: likewise.
        group_size: G.

    Returns:
        [M, N].
    """
    M, K = x.shape
    N = 16 * qweight.shape[0]
    y = _launch.empty((M, N), dtype=x.dtype, device=x.device)
    if M == 0:
        return y
    x = _aligned(x)
    token_tiles = 1 if M <= 8 else 2
    row_tiles = min(tile.row_tiles, N // 16)
    programs = triton.cdiv(N, 16 * row_tiles * tile.row_warps)
    partial = None
    if tile.split_k > 1:
        size = programs * tile.split_k * token_tiles * 8 * 16 * row_tiles * tile.row_warps
        partial = _launch.empty((size,), dtype=torch.float32, device=x.device)
    w4a16_decode_kernel[(programs, tile.split_k)](
        x,
        qweight,
        scales,
        zeros,
        bias,
        y,
        partial,
        arrivals if tile.split_k > 1 else None,
        M,
        N,
        x.stride(0),
        HAS_ZEROS=zeros is not None,
        HAS_BIAS=bias is not None,
        ELEMENT=_ELEMENT[x.dtype],
        ROW_TILES=row_tiles,
        **launch_constants(tile, K, token_tiles, 0 if group_size == K else group_size),
        num_warps=tile.num_warps,
        maxnreg=tile.registers or None,
    )
    return y


def _launch_w4a16_decode(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    arrivals: torch.Tensor,
    group_size: int,
) -> torch.Tensor:
    M, K = x.shape
    tile = tiles_decode.lookup(
        _launch.gpu_name(x.device), 16 * qweight.shape[0], K, 1 if M <= 8 else 2
    )
    return launch(tile, x, qweight, scales, zeros, bias, arrivals, group_size)


def _fake_w4a16_decode(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    arrivals: torch.Tensor,
    group_size: int,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], 16 * qweight.shape[0]))


torch.library.define(
    f"taut::{OP}",
    "(Tensor x, Tensor qweight, Tensor scales, Tensor? zeros, Tensor? bias, Tensor arrivals,"
    " int group_size) -> Tensor",
)
torch.library.impl(f"taut::{OP}", "CPU", w4a16_decode_ref)
torch.library.impl(f"taut::{OP}", "CUDA", _launch_w4a16_decode)
torch.library.register_fake(f"taut::{OP}", _fake_w4a16_decode)


def why_not_supported(N: int, K: int, group_size: int, dtype: torch.dtype) -> str | None:
    """Say why this op does not apply to a layer.

    Args:
        N: output features of the layer's shard.
        K: input features of the layer's shard.
        group_size: weights a scale covers along K, -1 for one group a channel.
        dtype: of the activations.

    Returns:
        A reason, or None where the op applies (to calls of at most 16 tokens).
    """
    return w4a16.why_not_supported(K, group_size, dtype) or formats_decode.why_no_layout(N, K)


def make_arrivals(N: int, device: torch.device) -> torch.Tensor:
    """Allocate a layer's ``arrivals``: [N/16] int32 zeros, kept as long as the layer."""
    return torch.zeros(N // formats_decode.ROW_TILE, dtype=torch.int32, device=device)


def w4a16_decode(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    group_size: int,
    arrivals: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply the activations of at most 16 tokens by 4-bit weights.

    Args:
        x: [..., K] fp16 or bf16, at most 16 rows; copied where rows are not 16-byte aligned.
        qweight: [N/16, K/64, 32, 4] int32, from :func:`formats_decode.repack_weight`.
        scales: [N/16, quads, 8, 4, 2], dtype of ``x``, from :func:`formats_decode.repack_scale`.
        zeros: as ``scales``, from :func:`formats_decode.repack_zero_point`, or None for a symmetric
            layer.
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
    if reason := why_not_supported(N, K, group_size, x.dtype):
        raise ValueError(reason)
    rows = x.reshape(-1, K)
    if rows.shape[0] > MAX_M:
        raise ValueError(f"x must have at most {MAX_M} rows, got {rows.shape[0]}")
    group = K if group_size == -1 else group_size
    _check_operands(x, N, K, group, qweight, scales, zeros, bias, arrivals)
    y: torch.Tensor = torch.ops.taut.w4a16_decode(
        rows, qweight, scales, zeros, bias, arrivals, group
    )
    return y.view(*x.shape[:-1], N)


def _check_operands(
    x: torch.Tensor,
    N: int,
    K: int,
    group_size: int,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    arrivals: torch.Tensor,
) -> None:
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, scales, bias)
    ):
        raise ValueError("w4a16_decode is forward only: call it under torch.no_grad()")
    pairs = (N // 16, -(-K // group_size // formats_decode.GROUPS_PER_QUAD), 8, 4, 2)
    operands: list[tuple[str, torch.Tensor | None, tuple[int, ...], torch.dtype]] = [
        ("qweight", qweight, (N // 16, K // 64, 32, 4), torch.int32),
        ("scales", scales, pairs, x.dtype),
        ("zeros", zeros, pairs, x.dtype),
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
