"""The regime of `taut::w4a16_gemm` for some 17 to 128 tokens: `wgmma` behind a ring of stages.

Maths     as :mod:`taut_kernels.gemm.w4a16`
Numerics  as :mod:`taut_kernels.gemm.w4a16_wgmma`: (q - z) · s is rounded once to the dtype of ``x``
          before the product; products accumulate in fp32 over all of K. For one tile, the same
          bits from run to run: splits are added in a fixed order.
Limits    as :mod:`taut_kernels.gemm.w4a16_wgmma`; sm_90 only
Source    The products of :mod:`taut_kernels.gemm.w4a16_wgmma`, the ring of
          :mod:`taut_kernels.gemm.w4a16_decode_ring`; converting one operand while the product
          before it runs: the main loop for mixed inputs of NVIDIA/cutlass
          (sm90_mma_tma_gmma_rs_warpspecialized_mixed_input.hpp). The rest is ours.
"""

from __future__ import annotations

import torch

from taut_kernels import _launch
from taut_kernels.gemm._w4a16_wgmma_ring_jit import w4a16_wgmma_ring_kernel
from taut_kernels.gemm.w4a16_wgmma import ELEMENT, reorder
from taut_kernels.tiles_wgmma_ring import WgmmaRingTile

_KERNEL = _launch.Launcher(w4a16_wgmma_ring_kernel)


def launch_constants(
    tile: WgmmaRingTile, K: int, group_size: int, *, has_zeros: bool
) -> dict[str, int | bool]:
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
        "BLOCK_M": tile.block_m,
        "WARPS": tile.num_warps,
        "CHUNKS_PER_STEP": tile.chunks_per_step,
        "SPLIT_K": tile.split_k,
        "STAGES": tile.stages_that_fit(group_size, has_zeros=has_zeros),
        "REORDERED": tile.reordered,
        "PARTS": tile.parts,
        "RUNNING": tile.running,
        "PDL": True,
    }


def launch(
    tile: WgmmaRingTile,
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    arrivals: torch.Tensor,
    group_size: int,
) -> torch.Tensor:
    """Run the kernel with a given tile; what the op does after the look-up, and what tuning calls.

    Args:
        tile: how to cut the work.
        x: [M, K], M ≥ 1, rows 16-byte aligned.
        qweight: as in the contract of :mod:`taut_kernels.gemm.w4a16`.
        scales: likewise.
        zeros: likewise.
        bias: likewise.
        arrivals: likewise.
        group_size: G.

    Returns:
        [M, N].

    Raises:
        ValueError: the tile makes more partial sums meet than ``arrivals`` counts, or its ring does
            not fit shared memory.
    """
    M, K = x.shape
    N = 16 * qweight.shape[0]
    y = _launch.empty((M, N), dtype=x.dtype, device=x.device)
    row_tiles = min(tile.group_tiles, N // 16)
    rows = 64 * row_tiles * tile.warp_groups
    grid = (-(-N // rows), tile.split_k, -(-M // tile.block_m))
    partial = None
    if tile.split_k > 1:
        tiles = grid[0] * grid[2]
        if tiles > arrivals.numel():
            raise ValueError(f"split_k: {tiles} tiles meet, arrivals counts {arrivals.numel()}")
        size = tiles * tile.split_k * rows * tile.block_m
        partial = _launch.empty((size,), dtype=torch.float32, device=x.device)
    if tile.reordered:
        x = reorder(x)

    def constants() -> tuple[_launch.Constants, _launch.Constants]:
        group = 0 if group_size == K else group_size
        named = launch_constants(tile, K, group, has_zeros=zeros is not None) | {
            "HAS_BIAS": bias is not None,
            "ELEMENT": ELEMENT[x.dtype],
            "ROW_TILES": row_tiles,
        }
        options = {"num_warps": tile.num_warps, "maxnreg": tile.registers or None}
        return named, options | _launch.PDL_OPTIONS[True]

    _KERNEL(
        (tile, N, K, group_size, x.dtype, zeros is None, bias is None),
        grid,
        (x, qweight, scales, zeros, bias, y, partial, arrivals if tile.split_k > 1 else None),
        (M, N, x.stride(0)),
        constants,
        (x.stride(0),),
    )
    return y
