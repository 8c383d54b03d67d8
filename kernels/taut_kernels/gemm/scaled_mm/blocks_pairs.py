"""Launches the kernel of FP8 products with 128 × 128 blocks of weights and few tokens (sm_90)."""

from __future__ import annotations

import torch

from taut_kernels.gemm.scaled_mm.blocks_pairs_kernel import fp8_block_pairs_kernel
from taut_kernels.gemm.scaled_mm.call import block_arguments, form_key
from taut_kernels.gemm.scaled_mm.pairs import launch_constants, launch_options
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile
from taut_kernels.launch import launcher as launching
from taut_kernels.launch.assembler import newest_ptxas

_pairs = launching.Launcher(fp8_block_pairs_kernel, newest_ptxas)


def launcher() -> launching.Launcher:
    """Return what launches the kernel, with its assembler."""
    return _pairs


def launch_block_pairs(
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
        tile: ``kernel`` pairs.
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
    tensors, integers = block_arguments(
        x, weight, x_scale, weight_scale, bias, partial, arrivals, y
    )
    _pairs(
        form_key(tile, x, weight, y, bias is None),
        (-(-N // tile.block_n), tile.split_k, -(-M // tile.block_m)),
        tensors,
        integers,
        lambda: (launch_constants(tile, K), launch_options(tile)),
    )
