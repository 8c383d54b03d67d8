"""The regime of `taut::w4a16_gemm` for at most 16 tokens: bound by weight bytes.

Maths     as :mod:`taut_kernels.gemm.w4a16`
Numerics  q - z is an integer and exact in either type; products accumulate in fp32 within a group,
          scale and bias are applied in fp32, one rounding at the store. For one tile, the same bits
          from run to run: K-warps and splits are added in a fixed order.
Limits    as :mod:`taut_kernels.gemm.w4a16`, M ≤ 16
Source    `mma.m16n8k16` with weights as the 16-row operand, so that tokens pad to 8 and not to 64.
          The rest is ours.
"""

from __future__ import annotations

import torch

from taut_kernels import _launch, tiles_decode
from taut_kernels.gemm._w4a16_decode_jit import w4a16_decode_kernel

MAX_M = 16
_KERNEL = _launch.Launcher(w4a16_decode_kernel)
_ELEMENT = {torch.bfloat16: "bf16", torch.float16: "f16"}


def launch_constants(
    tile: tiles_decode.DecodeTile, K: int, token_tiles: int, group_size: int, *, pdl: bool
) -> dict[str, int | bool]:
    """Return the kernel constants that follow from tile and shape.

    Args:
        tile: how to cut the work.
        K: input features.
        token_tiles: 1 for M ≤ 8, 2 for M ≤ 16.
        group_size: G, or 0 for one group a channel.
        pdl: the card has programmatic dependent launch.
    """
    return {
        "PDL": pdl,
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
        x: [M, K], 1 ≤ M ≤ 16, rows 16-byte aligned.
        qweight: as in the contract of :mod:`taut_kernels.gemm.w4a16`.
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
    token_tiles = 1 if M <= 8 else 2
    row_tiles = min(tile.row_tiles, N // 16)
    programs = -(-N // (16 * row_tiles * tile.row_warps))
    partial = None
    if tile.split_k > 1:
        size = programs * tile.split_k * token_tiles * 8 * 16 * row_tiles * tile.row_warps
        partial = _launch.empty((size,), dtype=torch.float32, device=x.device)

    def constants() -> tuple[_launch.Constants, _launch.Constants]:
        pdl = _launch.is_hopper(x.device)
        group = 0 if group_size == K else group_size
        named = launch_constants(tile, K, token_tiles, group, pdl=pdl) | {
            "HAS_ZEROS": zeros is not None,
            "HAS_BIAS": bias is not None,
            "ELEMENT": _ELEMENT[x.dtype],
            "ROW_TILES": row_tiles,
        }
        options = {"num_warps": tile.num_warps, "maxnreg": tile.registers or None}
        return named, options | _launch.PDL_OPTIONS[pdl]

    _KERNEL(
        (
            tile,
            N,
            K,
            token_tiles,
            group_size,
            x.dtype,
            zeros is None,
            bias is None,
        ),
        (programs, tile.split_k, 1),
        (x, qweight, scales, zeros, bias, y, partial, arrivals if tile.split_k > 1 else None),
        (M, N, x.stride(0)),
        constants,
        (x.stride(0),),
    )
    return y
