"""Launches the kernel of FP8 products with 128 × 128 blocks of weights and few tokens (sm_90)."""

from __future__ import annotations

from torch import Tensor

from taut_kernels.gemm.scaled_mm.blocks_pairs_kernel import fp8_block_pairs_kernel
from taut_kernels.gemm.scaled_mm.call import BlockOperands, Meeting, block_arguments, form_key
from taut_kernels.gemm.scaled_mm.pairs import launch_constants, launch_options
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile
from taut_kernels.launch import launcher as launching
from taut_kernels.launch.assembler import newest_ptxas

_pairs = launching.Launcher(fp8_block_pairs_kernel, newest_ptxas)


def launcher() -> launching.Launcher:
    """Return what launches the kernel, with its assembler."""
    return _pairs


def launch_block_pairs(
    tile: ScaledMmTile, operands: BlockOperands, meeting: Meeting, y: Tensor
) -> None:
    """Run the kernel of a tile whose ``kernel`` is pairs; it writes ``y`` [M, N], contiguous."""
    x, weight, *_, bias = operands
    (M, K), N = x.shape, weight.shape[0]
    tensors, integers = block_arguments(operands, meeting, y)
    _pairs(
        form_key(tile, x, weight, y, bias is None),
        (-(-N // tile.block_n), tile.split_k, -(-M // tile.block_m)),
        tensors,
        integers,
        lambda: (launch_constants(tile, K), launch_options(tile)),
    )
