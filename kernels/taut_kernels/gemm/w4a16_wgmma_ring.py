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
from taut_kernels.gemm import w4a16_sum, w4a16_wgmma_tma
from taut_kernels.gemm._w4a16_wgmma_ring_jit import w4a16_wgmma_ring_kernel
from taut_kernels.gemm.w4a16_wgmma import ELEMENT, Role, reorder
from taut_kernels.tiles_wgmma_ring import WgmmaRingTile

_KERNEL = _launch.Launcher(w4a16_wgmma_ring_kernel)


def launch_constants(
    tile: WgmmaRingTile, K: int, group_size: int, *, has_zeros: bool, role: Role = "alone"
) -> dict[str, int | bool | str]:
    """Return the kernel constants that follow from tile and shape.

    Args:
        tile: how to cut the work.
        K: input features.
        group_size: G, or 0 for one group a channel.
        has_zeros: with zero points.
        role: of this launch.

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
        "ROLE": role,
        "SUMMED": tile.summed,
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
    y = _launch.empty((x.shape[0], 16 * qweight.shape[0]), dtype=x.dtype, device=x.device)
    if tile.reordered:
        x = reorder(x)
    product(tile, x, qweight, scales, zeros, bias, arrivals, group_size, y)
    return y


def product(
    tile: WgmmaRingTile,
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    arrivals: torch.Tensor,
    group_size: int,
    y: torch.Tensor,
    role: Role = "alone",
) -> None:
    """Fill ``y``, which may be some columns of a larger result.

    Args:
        tile: how to cut the work.
        x: [M, K], in fragment order where the tile says so.
        qweight: of the output features of ``y``, as are the next three.
        scales: likewise.
        zeros: likewise.
        bias: likewise.
        arrivals: the layer's.
        group_size: G.
        y: [M, rows], the result's rows apart; parts of it are whole tiles.
        role: of this launch.

    Raises:
        ValueError: the tile makes more partial sums meet than ``arrivals`` counts, its ring does
            not fit shared memory, or it has ``tma`` and a role or more rows than the layer.
    """
    M, K = x.shape
    features = 16 * qweight.shape[0]
    N = y.stride(0)
    row_tiles = tile.group_tiles if tile.tma else min(tile.group_tiles, features // 16)
    rows = 64 * row_tiles * tile.warp_groups
    grid = (-(-features // rows), tile.split_k, -(-M // tile.block_m))
    partial, meet = None, tile.split_k > 1 and not tile.summed
    if tile.split_k > 1:
        tiles = grid[0] * grid[2]
        if meet and tiles > arrivals.numel():
            raise ValueError(f"split_k: {tiles} tiles meet, arrivals counts {arrivals.numel()}")
        size = tiles * tile.split_k * rows * tile.block_m
        partial = _launch.empty((size,), dtype=torch.float32, device=x.device)

    def constants() -> tuple[_launch.Constants, _launch.Constants]:
        group = 0 if group_size == K else group_size
        has_zeros = zeros is not None
        named = launch_constants(tile, K, group, has_zeros=has_zeros, role=role) | {
            "HAS_BIAS": bias is not None,
            "ELEMENT": ELEMENT[x.dtype],
            "ROW_TILES": row_tiles,
        }
        options = {"num_warps": tile.num_warps, "maxnreg": tile.registers or None}
        return named, options | _launch.PDL_OPTIONS[True]

    meeting = arrivals if meet else None
    if tile.tma:
        if role != "alone":
            raise ValueError(f"{tile} is no head and no tail")
        w4a16_wgmma_tma.product(
            tile, x, qweight, scales, zeros, bias, meeting, group_size, y, partial, grid
        )
    else:
        _KERNEL(
            (tile, N, K, group_size, x.dtype, zeros is None, bias is None, role, row_tiles),
            grid,
            (x, qweight, scales, zeros, bias, y, partial, meeting),
            (M, N, x.stride(0)),
            constants,
            (x.stride(0),),
        )
    if partial is not None and tile.summed:
        w4a16_sum.launch(
            partial,
            bias,
            y,
            (grid[0], grid[2]),
            split_k=tile.split_k,
            block_m=tile.block_m,
            num_warps=tile.num_warps,
            row_tiles=row_tiles,
        )
