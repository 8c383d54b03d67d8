"""Launches the kernel of FP8 products with 128 × 128 blocks of weights and few tokens (sm_90)."""

from __future__ import annotations

import torch

from taut_kernels import _launch
from taut_kernels._assembler import newest_ptxas
from taut_kernels.gemm._fp8_block_few_jit import fp8_block_few_kernel
from taut_kernels.tiles_scaled_mm import ScaledMmTile

_few = _launch.Launcher(fp8_block_few_kernel, newest_ptxas)


def launcher() -> _launch.Launcher:
    """Return what launches the kernel, with its assembler."""
    return _few


def launch_constants(tile: ScaledMmTile, K: int) -> _launch.Constants:
    """Return the constants of the kernel.

    Args:
        tile: ``kernel`` few, ``block_k`` 256.
        K: input features.
    """
    return {
        "COLS": tile.block_m,
        "SPLIT_K": tile.split_k,
        "STAGES": tile.num_stages,
        "EVEN_K": K % tile.block_k == 0,
    }


def launch_few_blocks(
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
    """Run the tile's kernel.

    Args:
        tile: ``kernel`` few, ``block_k`` 256.
        x: [M, K] e4m3, M ≥ 1; rows 16-byte aligned.
        weight: [N, K] e4m3, N % 8 == 0; rows 16-byte aligned.
        x_scale: [M, ceil(K/128)] fp32, any strides.
        weight_scale: [ceil(N/128), ceil(K/128)] fp32, stride 1 along K.
        bias: [N] or None.
        partial: the parts of sums, as many as ``tile.split_k`` a tile, or None for 1.
        arrivals: a zero for every tile; not read for a ``split_k`` of 1.
        y: [M, N], contiguous; written.
    """
    (M, K), N = x.shape, weight.shape[0]
    wide = x.stride(0) >> 31, weight.stride(0) >> 31
    _few(
        (tile, N, K, y.dtype, wide, bias is None),
        (-(-N // tile.block_n), tile.split_k, -(-M // tile.block_m)),
        (
            x,
            weight,
            x_scale,
            weight_scale,
            bias,
            y,
            partial,
            None if partial is None else arrivals,
        ),
        (
            M,
            x_scale.stride(0),
            x_scale.stride(1),
            weight_scale.stride(0),
            N,
            K,
            x.stride(0),
            weight.stride(0),
        ),
        lambda: (launch_constants(tile, K), {"num_warps": tile.num_warps}),
    )
