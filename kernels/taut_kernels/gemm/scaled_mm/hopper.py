"""Launches the 8-bit products' kernels of sm_90 that TMA feeds."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from taut_kernels.gemm.scaled_mm.call import Operands
from taut_kernels.gemm.scaled_mm.hopper_kernel import scaled_mm_hopper_kernel
from taut_kernels.gemm.scaled_mm.tile import BLOCKS, ScaledMmTile
from taut_kernels.gemm.scaled_mm.turns_kernel import scaled_mm_turns_kernel
from taut_kernels.launch import launcher as launching
from taut_kernels.launch.descriptors import Describe

ROWS = 64
"""Tokens a group of warps multiplies where both share a tile; columns of a block TMA stores."""
STEP = 128
"""Bytes of K, hence elements, of a block TMA loads."""
OPERAND_LAYOUT = gl.NVMMASharedLayout(STEP, 8, 2)
RESULT_LAYOUT = gl.NVMMASharedLayout(2 * ROWS, 16, 2)
NARROW_RESULT_LAYOUT = gl.NVMMASharedLayout(ROWS, 16, 2)
"""Of blocks in shared memory: what `wgmma` reads and `stmatrix` writes without bank conflicts."""

_hopper = launching.Launcher(scaled_mm_hopper_kernel)
_turns = launching.Launcher(scaled_mm_turns_kernel)


def rows_of_block(tile: ScaledMmTile) -> int:
    """Return the tokens of a block that TMA loads and stores."""
    return tile.block_m if tile.kernel == "turns" else ROWS


def columns_of_blocks(tile: ScaledMmTile) -> tuple[int, int]:
    """Return the features of a tile as blocks of TMA: a power of two, and what is left, or 0."""
    columns: int = 1 << (tile.block_n.bit_length() - 1)
    return columns, tile.block_n - columns


def result_layout(tile: ScaledMmTile) -> tuple[int, gl.NVMMASharedLayout]:
    """Return the columns of a block that TMA stores, and its layout.

    Narrow ones for tiles of two parts, and where the ring leaves no room for others.
    """
    if columns_of_blocks(tile)[1] or tile.kernel == BLOCKS:
        return ROWS // 2, NARROW_RESULT_LAYOUT
    return ROWS, RESULT_LAYOUT


def launch_constants(tile: ScaledMmTile) -> launching.Constants:
    """Return the constants of the kernel.

    Args:
        tile: ``kernel`` hopper or turns.
    """
    columns, further = columns_of_blocks(tile)
    constants = {"COLUMNS": columns, "FURTHER": further}
    constants |= {"STAGES": tile.num_stages, "GROUP_M": tile.group_m}
    return constants if tile.kernel == "hopper" else constants | {"ROWS": tile.block_m}


@cache
def _blocks(rows: int) -> Describe:
    return Describe([rows, STEP], OPERAND_LAYOUT)


@cache
def results(tile: ScaledMmTile) -> Describe:
    """Return what describes the results in the blocks TMA stores."""
    width, layout = result_layout(tile)
    return Describe([rows_of_block(tile), width], layout)


def operand(matrix: Tensor, rows: int) -> TensorDescriptor:
    """Describe a matrix in blocks of some rows; TMA reads none whose rows overlap (expanded).

    Args:
        matrix: [rows, K] of one-byte elements; rows 16-byte aligned.
        rows: of a block.
    """
    count, width = matrix.shape
    if count > 1 and matrix.stride(0) < width:
        matrix = matrix.contiguous()
    # The stride of one row means nothing, but has to be a valid one.
    step = matrix.stride(0) if count > 1 else width
    return _blocks(rows)(matrix, [count, width], [step, 1])


def launch_hopper(tile: ScaledMmTile, operands: Operands, y: Tensor) -> None:
    """Run the tile's kernel.

    Args:
        tile: ``kernel`` hopper or turns.
        operands: as :data:`.call.Operands` says.
        y: [M, N], contiguous; written.
    """
    x, weight, x_scale, weight_scale, azp_adj, azp, bias = operands
    (M, K), N = x.shape, weight.shape[0]
    tiles_m, tiles_n = -(-M // tile.block_m), -(-N // tile.block_n)
    rows, (columns, further) = rows_of_block(tile), columns_of_blocks(tile)
    more: Any = operand(weight, further) if further else None
    launcher = _turns if tile.kernel == "turns" else _hopper
    launcher(
        (tile, x.dtype, y.dtype, azp_adj is None, azp is None, bias is None),
        (min(tiles_m * tiles_n, launching.multiprocessors(x.device)), 1, 1),
        (x_scale, weight_scale, azp_adj, azp, bias),
        (
            operand(x, rows),
            operand(weight, columns),
            more,
            results(tile)(y, [M, N], [N, 1]),
            M,
            N,
            -(-K // STEP),
            tiles_m,
            tiles_n,
            int(x_scale.numel() > 1),
            int(weight_scale.numel() > 1),
        ),
        lambda: (launch_constants(tile), {"num_warps": tile.num_warps}),
    )
