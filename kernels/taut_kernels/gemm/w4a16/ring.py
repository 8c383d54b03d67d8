"""The kernel of `taut::w4a16_gemm` for some 17 to 128 tokens: `wgmma` behind a ring of stages.

Maths     as :mod:`.op`
Numerics  as :mod:`.portable`: (q - z) · s is rounded once to the dtype of ``x``
          before the product; products accumulate in fp32 over all of K. For one tile, the same
          bits from run to run: splits are added in a fixed order.
Limits    as :mod:`.portable`; sm_90 only
Source    The products of :mod:`.portable`, the ring of
          :mod:`.decode_ring`; converting one operand while the product
          before it runs: the main loop for mixed inputs of NVIDIA/cutlass
          (sm90_mma_tma_gmma_rs_warpspecialized_mixed_input.hpp). The rest is ours.
"""

from __future__ import annotations

from taut_kernels.gemm.w4a16 import tma as w4a16_wgmma_tma
from taut_kernels.gemm.w4a16.plan import ELEMENT, Call, Fills, OneProduct, Product
from taut_kernels.gemm.w4a16.ring_kernel import w4a16_wgmma_ring_kernel
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile, require_meeting_places
from taut_kernels.launch import launcher

_KERNEL = launcher.Launcher(w4a16_wgmma_ring_kernel)


def plan(tile: WgmmaRingTile, call: Call) -> OneProduct:
    """Prepare a call.

    Args:
        tile: how to cut the work.
        call: what to prepare for.

    Raises:
        ValueError: as of :func:`product`.
    """
    return OneProduct(product(tile, call, call.N), call)


def product(tile: WgmmaRingTile, call: Call, rows: int) -> Fills:
    """Prepare the product of some output features, as :func:`.portable.product` does.

    Raises:
        ValueError: as there, or the tile has ``tma`` and more rows than the layer.
    """
    if tile.tma:
        return w4a16_wgmma_tma.product(tile, call, rows)
    row_tiles = min(tile.group_tiles, rows // 16)
    tile_rows = 64 * row_tiles * tile.warp_groups
    grid = (-(-rows // tile_rows), tile.split_k, -(-call.M // tile.block_m))
    split = tile.split_k > 1
    if split:
        require_meeting_places(grid[0] * grid[2], call.N)

    def constants() -> tuple[launcher.Constants, launcher.Constants]:
        cut = tile.cut(call.group, has_zeros=call.has_zeros, row_tiles=row_tiles)
        named = {"CUT": cut, "PDL": True, "ELEMENT": ELEMENT[call.dtype]} | call.constants
        options = {"num_warps": tile.num_warps, "maxnreg": tile.registers or None}
        return named, options | launcher.PDL_OPTIONS[True]

    return Product(
        _KERNEL.form((tile, row_tiles, call.form), call.device_number),
        constants,
        call.N,
        grid,
        grid[0] * grid[1] * grid[2] * tile_rows * tile.block_m if split else 0,
        meet=split,
    )
