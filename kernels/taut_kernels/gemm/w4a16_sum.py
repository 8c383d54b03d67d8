"""The second launch of a `wgmma` ring whose K is split: adds the splits' sums, in their order.

Maths     y[m, n] = Σ_s partial_s[m, n] + bias[n]
Numerics  fp32, one rounding at the store; the same bits from run to run
"""

from __future__ import annotations

import torch

from taut_kernels import _launch
from taut_kernels.gemm._w4a16_sum_jit import sum_splits_kernel

TOKENS = 32
"""Most tokens a program adds up."""
WARPS = 4
_KERNEL = _launch.Launcher(sum_splits_kernel)


def launch(
    partial: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tiles: tuple[int, int],
    *,
    split_k: int,
    block_m: int,
    num_warps: int,
    row_tiles: int,
) -> None:
    """Fill ``y``.

    Args:
        partial: [tiles of y, split_k, sums of a tile] fp32.
        bias: [rows] or None.
        y: [M, rows], its rows any multiple of 16 apart.
        tiles: of rows and of tokens.
        split_k: programs along K.
        block_m: tokens a tile.
        num_warps: warps of the products, 16 · ``row_tiles`` rows each.
        row_tiles: tiles of 16 rows a warp.
    """
    M, rows = y.shape
    N = y.stride(0)
    tokens = min(TOKENS, block_m)

    def constants() -> tuple[_launch.Constants, _launch.Constants]:
        pdl = _launch.is_hopper(y.device)
        named = {
            "SPLIT_K": split_k,
            "BLOCK_M": block_m,
            "TOKENS": tokens,
            "WARPS": num_warps,
            "ROW_TILES": row_tiles,
            "HAS_BIAS": bias is not None,
            "PDL": pdl,
        }
        return named, {"num_warps": WARPS} | _launch.PDL_OPTIONS[pdl]

    _KERNEL(
        (split_k, block_m, num_warps, row_tiles, bias is None, y.dtype),
        (tiles[0], block_m // tokens, tiles[1]),
        (partial, bias, y),
        (M, N, rows),
        constants,
    )
