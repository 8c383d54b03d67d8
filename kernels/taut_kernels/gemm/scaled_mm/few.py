"""Launches the 8-bit products' kernel of few tokens that TMA feeds (sm_90)."""

from __future__ import annotations

from torch import Tensor

from taut_kernels.gemm.scaled_mm.call import Meeting, Operands
from taut_kernels.gemm.scaled_mm.few_kernel import scaled_mm_few_kernel
from taut_kernels.gemm.scaled_mm.hopper import STEP, operand
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile
from taut_kernels.launch import launcher

TOKENS = 32
"""Of a block that TMA loads: M is asked for in as many of them as have some."""

_few = launcher.Launcher(scaled_mm_few_kernel)


def launch_constants(tile: ScaledMmTile) -> launcher.Constants:
    """Return the constants of the kernel.

    Args:
        tile: ``kernel`` few.
    """
    return {
        "COLS": tile.block_m,
        "SPLIT_K": tile.split_k,
        "STAGES": tile.num_stages,
        "STEP": tile.block_k // STEP,
    }


def launch_options(tile: ScaledMmTile) -> launcher.Constants:
    """Return compiler options: the registers of the warps that multiply and of the one that asks.

    What that one leaves goes to the others: 232 each of one group, 240 each of two.

    Args:
        tile: ``kernel`` few.
    """
    return {"num_warps": tile.num_warps, "maxnreg": 128 if tile.block_n == 64 else 168}


def launch_few(tile: ScaledMmTile, operands: Operands, meeting: Meeting, y: Tensor) -> None:
    """Run the kernel of a tile whose ``kernel`` is few; it writes ``y`` [M, N], contiguous."""
    x, weight, x_scale, weight_scale, azp_adj, azp, bias = operands
    (M, K), N = x.shape, weight.shape[0]
    _few(
        (tile, x.dtype, y.dtype, N % 16, azp_adj is None, azp is None, bias is None),
        (-(-N // tile.block_n), tile.split_k, -(-M // tile.block_m)),
        (x_scale, weight_scale, azp_adj, azp, bias, y, *meeting),
        (
            operand(x, TOKENS),
            operand(weight, tile.block_n),
            M,
            N,
            -(-K // tile.block_k),
            int(x_scale.numel() > 1),
            int(weight_scale.numel() > 1),
        ),
        lambda: (launch_constants(tile), launch_options(tile)),
    )
