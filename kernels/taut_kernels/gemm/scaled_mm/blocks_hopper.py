"""Launches the kernels of sm_90 for FP8 products with 128 × 128 blocks of weights."""

from __future__ import annotations

from torch import Tensor

from taut_kernels.gemm.scaled_mm.blocks_hopper_kernel import fp8_block_hopper_kernel
from taut_kernels.gemm.scaled_mm.blocks_tall_kernel import fp8_block_tall_kernel
from taut_kernels.gemm.scaled_mm.call import BlockOperands, Meeting
from taut_kernels.gemm.scaled_mm.hopper import ROWS, STEP, operand, results
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile
from taut_kernels.launch import launcher as launching
from taut_kernels.launch.assembler import newest_ptxas

FEW = 16
"""Tokens of a block that TMA loads where a tile has 64: M is asked for in as many as have some."""
_HALF_RING_BYTES = 105 * 1024
"""Of a ring beside which a second program has room, with its results."""
_blocks = launching.Launcher(fp8_block_hopper_kernel, newest_ptxas)
_tall = launching.Launcher(fp8_block_tall_kernel, newest_ptxas)


def is_tall(tile: ScaledMmTile) -> bool:
    """Say which of the two kernels a tile of ``blocks`` is of: a group's tokens are twice 64."""
    return tile.block_m == 4 * ROWS


def launcher(tile: ScaledMmTile) -> launching.Launcher:
    """Return what launches a tile of ``blocks``, with its kernel and its assembler."""
    return _tall if is_tall(tile) else _blocks


def launch_constants(tile: ScaledMmTile) -> launching.Constants:
    """Return the constants of a tile's kernel.

    Args:
        tile: ``kernel`` blocks.
    """
    constants = {"STAGES": tile.num_stages, "GROUP_M": tile.group_m}
    if is_tall(tile):
        return constants
    of_tile = {"TOKENS": tile.block_m, "COLUMNS": tile.block_n, "SPLIT_K": tile.split_k}
    return constants | of_tile


def launch_options(tile: ScaledMmTile) -> launching.Constants:
    """Return compiler options: with one group of warps, room for two programs a multiprocessor.

    Args:
        tile: ``kernel`` blocks.
    """
    options = {"num_warps": tile.num_warps}
    return options | ({"maxnreg": 128} if tile.block_m == ROWS else {})


def tokens_of_box(tile: ScaledMmTile) -> int:
    """Return the tokens of a block that TMA loads."""
    return FEW if tile.block_m == ROWS else ROWS


def programs(tile: ScaledMmTile, tiles: int, multiprocessors: int) -> int:
    """Return how many programs walk through so many tiles: two a multiprocessor with room."""
    ring = tile.num_stages * ((tile.block_m + tile.block_n) * STEP + 4 * (tile.block_m + 1))
    each = 2 if tile.block_m == ROWS and ring <= _HALF_RING_BYTES else 1
    return min(tiles * tile.split_k, each * multiprocessors)


def launch_blocks(tile: ScaledMmTile, operands: BlockOperands, meeting: Meeting, y: Tensor) -> None:
    """Run the kernel of a tile whose ``kernel`` is blocks; it writes ``y`` [M, N], contiguous.

    It reads ``x_scale`` fastest where tokens are contiguous. Parts meet by 64 tokens of a tile.
    """
    x, weight, x_scale, weight_scale, bias = operands
    (M, K), N = x.shape, weight.shape[0]
    tiles_m, tiles_n = -(-M // tile.block_m), -(-N // tile.block_n)
    parts = () if is_tall(tile) else meeting
    launcher(tile)(
        (tile, y.dtype, bias is None),
        (programs(tile, tiles_m * tiles_n, launching.multiprocessors(x.device)), 1, 1),
        (x_scale, weight_scale, bias, *parts),
        (
            operand(x, tokens_of_box(tile)),
            operand(weight, tile.block_n),
            results(tile)(y, [M, N], [N, 1]),
            M,
            N,
            -(-K // STEP),
            tiles_m,
            tiles_n,
            x_scale.stride(0),
            x_scale.stride(1),
            weight_scale.stride(0),
        ),
        lambda: (launch_constants(tile), launch_options(tile)),
    )
