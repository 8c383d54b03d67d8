"""Launches the 8-bit products' kernel of few tokens that takes a pair of blocks a step (sm_90)."""

from __future__ import annotations

from torch import Tensor

from taut_kernels.gemm.scaled_mm.call import Meeting, Operands, form_key
from taut_kernels.gemm.scaled_mm.pairs_kernel import scaled_mm_pairs_kernel
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile
from taut_kernels.launch import launcher

_pairs = launcher.Launcher(scaled_mm_pairs_kernel)


def launch_constants(tile: ScaledMmTile, K: int) -> launcher.Constants:
    """Return the constants of the kernel, and of the one for blocks of weights.

    Args:
        tile: ``kernel`` pairs.
        K: input features.
    """
    return {
        "ROWS": tile.block_n,
        "COLS": tile.block_m,
        "SPLIT_K": tile.split_k,
        "STAGES": tile.num_stages,
        "EVEN_K": K % tile.block_k == 0,
        "EARLY": tile.early,
        "PREFETCH": tile.prefetch,
    }


def launch_options(tile: ScaledMmTile) -> launcher.Constants:
    """Return compiler and launch options, likewise of both.

    Args:
        tile: ``kernel`` pairs.
    """
    return {"num_warps": tile.num_warps} | launcher.PDL_OPTIONS[tile.early]


def launch_pairs(tile: ScaledMmTile, operands: Operands, meeting: Meeting, y: Tensor) -> None:
    """Run the kernel of a tile whose ``kernel`` is pairs; it writes ``y`` [M, N], contiguous."""
    x, weight, x_scale, weight_scale, azp_adj, azp, bias = operands
    (M, K), N = x.shape, weight.shape[0]
    absent = azp_adj is None, azp is None, bias is None
    _pairs(
        form_key(tile, x, weight, y, *absent),
        (-(-N // tile.block_n), tile.split_k, -(-M // tile.block_m)),
        (x, weight, x_scale, weight_scale, azp_adj, azp, bias, y, *meeting),
        (
            M,
            int(x_scale.numel() > 1),
            int(weight_scale.numel() > 1),
            N,
            K,
            x.stride(0),
            weight.stride(0),
        ),
        lambda: (launch_constants(tile, K), launch_options(tile)),
    )
