"""Launches the `wgmma` ring kernel whose stages TMA fills.

Regime, maths and numerics: :mod:`taut_kernels.gemm.w4a16_wgmma_ring`, whose tiles with ``tma`` this
runs. N is at least a tile's rows.
"""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from taut_kernels import _launch
from taut_kernels.gemm._w4a16_wgmma_tma_jit import w4a16_wgmma_tma_kernel
from taut_kernels.tiles_wgmma_ring import WgmmaRingTile

WORD_LAYOUT = gl.NVMMASharedLayout(128, 32, 3)
TOKEN_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)
"""Of weights and activations in shared memory: rows of 128 bytes, swizzled."""
_KERNEL = _launch.Launcher(w4a16_wgmma_tma_kernel)


def word_block(tile: WgmmaRingTile) -> list[int]:
    """Return the block of weights a step of a tile takes: row tiles, quarters of chunks, words."""
    return [tile.rows // 16, 4 * tile.chunks_per_step, 32]


def launch_constants(
    tile: WgmmaRingTile, K: int, group_size: int, *, has_zeros: bool
) -> dict[str, int | bool | str]:
    """Return the kernel constants that follow from tile and shape.

    Args:
        tile: how to cut the work.
        K: input features.
        group_size: G, or 0 for one group a channel.
        has_zeros: with zero points.

    Raises:
        ValueError: the tile's ring does not fit shared memory.
    """
    return {
        "K": K,
        "GROUP_SIZE": group_size,
        "HAS_ZEROS": has_zeros,
        "ROW_TILES": tile.group_tiles,
        "WARPS": tile.num_warps,
        "CHUNKS_PER_STEP": tile.chunks_per_step,
        "SPLIT_K": tile.split_k,
        "STAGES": tile.stages_that_fit(group_size, has_zeros=has_zeros),
        "PARTS": tile.parts,
        "RUNNING": tile.running,
    }


def product(
    tile: WgmmaRingTile,
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    arrivals: torch.Tensor | None,
    group_size: int,
    y: torch.Tensor,
    partial: torch.Tensor | None,
    grid: tuple[int, int, int],
) -> None:
    """Fill ``y``.

    Args:
        tile: how to cut the work, with ``tma``.
        x: [M, K], rows 16-byte aligned.
        qweight: as in the contract of :mod:`taut_kernels.gemm.w4a16`.
        scales: likewise.
        zeros: likewise.
        bias: likewise.
        arrivals: likewise, where splits meet.
        group_size: G.
        y: [M, N].
        partial: room for every split's sums, if any.
        grid: programs along features, splits and tokens.

    Raises:
        ValueError: the layer has fewer features than the tile, or its ring does not fit.
    """
    (M, K), N = x.shape, y.shape[1]
    if tile.rows > N:
        raise ValueError(f"{tile} takes {tile.rows} features at least, got {N}")

    def constants() -> tuple[_launch.Constants, _launch.Constants]:
        group = 0 if group_size == K else group_size
        named = launch_constants(tile, K, group, has_zeros=zeros is not None) | {
            "HAS_BIAS": bias is not None,
        }
        options = {"num_warps": tile.num_warps, "maxnreg": tile.registers or None}
        return named, options | _launch.PDL_OPTIONS[True]

    # The stride of one row means nothing, but has to be a valid one.
    step = x.stride(0) if M > 1 else K
    _KERNEL(
        (tile, N, K, group_size, x.dtype, zeros is None, bias is None),
        grid,
        (scales, zeros, bias, y, partial, arrivals),
        (
            TensorDescriptor(x, [M, K], [step, 1], [tile.block_m // 2, 64], TOKEN_LAYOUT),
            TensorDescriptor(
                qweight, [N // 16, K // 16, 32], [2 * K, 32, 1], word_block(tile), WORD_LAYOUT
            ),
            M,
            N,
        ),
        constants,
    )
