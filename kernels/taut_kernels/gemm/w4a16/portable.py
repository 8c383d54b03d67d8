"""The portable kernel of `taut::w4a16_gemm` for more than 16 tokens, in plain Triton.

The only one on cards without `wgmma`. On a card with it the kernels of :mod:`.rule` are faster on
every shape measured; it is left with layers too narrow or too short for those.

Maths     as :mod:`.op`
Numerics  (q - z) · s is rounded once to the dtype of ``x`` before the product (the decode kernel
          does not); products accumulate in fp32 over all of K. For one tile, the same bits from run
          to run: splits are added in a fixed order.
Limits    as :mod:`.op`; (q - z) · s must be finite in the dtype of ``x``
Source    Weights as the 64-row register operand of `wgmma` (`mma.sync` elsewhere), tokens as its
          columns, so that few tokens do not pad to 64: the idea of Triton's MXFP4 kernels for
          Hopper (triton-lang/triton, PR 6833). The rest is ours.
"""

from __future__ import annotations

from torch import Tensor

from taut_kernels.gemm.w4a16.plan import ELEMENT, Call, OneProduct, Product
from taut_kernels.gemm.w4a16.portable_kernel import reorder_kernel, w4a16_wgmma_kernel
from taut_kernels.gemm.w4a16.portable_tile import Cut, WgmmaTile
from taut_kernels.gemm.w4a16.ring_tile import require_meeting_places
from taut_kernels.launch import launcher

_REORDER_BLOCK = 2048
_PRODUCT = launcher.Launcher(w4a16_wgmma_kernel)
_REORDER = launcher.Launcher(reorder_kernel)


def reorder(x: Tensor) -> Tensor:
    """Return ``x`` [M, K] with its columns in fragment order, contiguous."""
    M, K = x.shape
    out = launcher.empty((M, K), dtype=x.dtype, device=x.device)

    def constants() -> tuple[launcher.Constants, launcher.Constants]:
        pdl = launcher.is_hopper(x.device)
        return {"BLOCK": _REORDER_BLOCK, "PDL": pdl}, dict(launcher.PDL_OPTIONS[pdl])

    _REORDER(
        (K, x.dtype),
        (M, -(-K // _REORDER_BLOCK), 1),
        (x, out),
        (K, x.stride(0)),
        constants,
        (x.stride(0),),
    )
    return out


def plan(tile: WgmmaTile, call: Call) -> OneProduct:
    """Prepare a call.

    Args:
        tile: how to cut the work.
        call: what to prepare for.

    Raises:
        ValueError: the tile makes more partial sums meet than ``arrivals`` counts.
    """
    return OneProduct(product(tile, call, call.N), call, reorder if tile.reordered else None)


def product(tile: WgmmaTile, call: Call, rows: int) -> Product:
    """Prepare the product of some output features, whose parts are whole tiles.

    Args:
        tile: how to cut the work.
        call: what to prepare for.
        rows: how many of its features.

    Raises:
        ValueError: the tile makes more partial sums meet than ``arrivals`` counts.
    """
    grid = (-(-rows // tile.rows), tile.split_k, -(-call.M // tile.block_m))
    sums = 0
    if tile.split_k > 1:
        require_meeting_places(grid[0] * grid[2], call.N)
        sums = grid[0] * grid[1] * grid[2] * tile.rows * tile.block_m

    def constants() -> tuple[launcher.Constants, launcher.Constants]:
        # Whose products go on after they were issued, and that has programmatic dependent launch.
        hopper = launcher.is_hopper(call.device)
        cut = Cut(
            block_m=tile.block_m,
            chunks_per_step=1 if (call.K // 64) % 2 else tile.chunks_per_step,
            split_k=tile.split_k,
            reordered=tile.reordered,
            early_wait=tile.early_wait and hopper,
            warps=tile.num_warps,
        )
        options = {"num_warps": tile.num_warps} | launcher.PDL_OPTIONS[hopper]
        named = {"CUT": cut, "PDL": hopper, "ELEMENT": ELEMENT[call.dtype]}
        return named | call.constants, options

    form = _PRODUCT.form((tile, call.form), call.device_number)
    return Product(form, constants, call.N, grid, sums, meet=tile.split_k > 1)
