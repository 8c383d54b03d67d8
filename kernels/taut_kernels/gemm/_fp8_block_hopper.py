"""Launches the kernels of sm_90 for FP8 products with 128 × 128 blocks of weights."""

from __future__ import annotations

import torch

from taut_kernels import _launch
from taut_kernels._assembler import newest_ptxas
from taut_kernels.gemm._fp8_block_hopper_jit import fp8_block_hopper_kernel
from taut_kernels.gemm._fp8_block_tall_jit import fp8_block_tall_kernel
from taut_kernels.gemm._scaled_mm_hopper import ROWS, STEP, operand, results
from taut_kernels.tiles_scaled_mm import ScaledMmTile

_blocks = _launch.Launcher(fp8_block_hopper_kernel, newest_ptxas)
_tall = _launch.Launcher(fp8_block_tall_kernel, newest_ptxas)


def is_tall(tile: ScaledMmTile) -> bool:
    """Say which of the two kernels a tile of ``blocks`` is of: a group's tokens are twice 64."""
    return tile.block_m == 4 * ROWS


def launcher(tile: ScaledMmTile) -> _launch.Launcher:
    """Return what launches a tile of ``blocks``, with its kernel and its assembler."""
    return _tall if is_tall(tile) else _blocks


def launch_constants(tile: ScaledMmTile) -> _launch.Constants:
    """Return the constants of a tile's kernel.

    Args:
        tile: ``kernel`` blocks.
    """
    constants = {"STAGES": tile.num_stages, "GROUP_M": tile.group_m}
    if is_tall(tile):
        return constants
    return constants | {"COLUMNS": tile.block_n, "SPLIT_K": tile.split_k}


def launch_blocks(
    tile: ScaledMmTile,
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    partial: torch.Tensor | None,
    arrivals: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """Run a tile's kernel.

    Args:
        tile: ``kernel`` blocks.
        x: [M, K] e4m3, M ≥ 1; rows 16-byte aligned.
        weight: [N, K] e4m3, N % 8 == 0; rows 16-byte aligned.
        x_scale: [M, ceil(K/128)] fp32, any strides; read fastest where tokens are contiguous.
        weight_scale: [ceil(N/128), ceil(K/128)] fp32, stride 1 along K.
        bias: [N] or None.
        partial: the parts of sums, as many as ``tile.split_k`` a tile, or None for 1.
        arrivals: two zeros for every tile; not read for a ``split_k`` of 1.
        y: [M, N], contiguous; written.
    """
    (M, K), N = x.shape, weight.shape[0]
    tiles_m, tiles_n = -(-M // tile.block_m), -(-N // tile.block_n)
    parts = () if is_tall(tile) else (partial, None if partial is None else arrivals)
    launcher(tile)(
        (tile, y.dtype, bias is None),
        (min(tiles_m * tiles_n * tile.split_k, _launch.multiprocessors(x.device)), 1, 1),
        (x_scale, weight_scale, bias, *parts),
        (
            operand(x, ROWS),
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
        lambda: (launch_constants(tile), {"num_warps": tile.num_warps}),
    )
