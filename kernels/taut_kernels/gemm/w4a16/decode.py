"""The kernel of `taut::w4a16_gemm` for at most 16 tokens: bound by weight bytes.

From 9 tokens on it is for cards without `wgmma`, and for layers too small for a ring.

Maths     as :mod:`.op`
Numerics  q - z is an integer and exact in either type; products accumulate in fp32 within a group,
          scale and bias are applied in fp32, one rounding at the store. For one tile, the same bits
          from run to run: K-warps and splits are added in a fixed order.
Limits    as :mod:`.op`, M ≤ 16
Source    `mma.m16n8k16` with weights as the 16-row operand, so that tokens pad to 8 and not to 64.
          The rest is ours.
"""

from __future__ import annotations

from taut_kernels.gemm.w4a16 import decode_tile as tiles_decode
from taut_kernels.gemm.w4a16.decode_kernel import w4a16_decode_kernel
from taut_kernels.gemm.w4a16.plan import Call, OneProduct, plan_rows
from taut_kernels.launch import launcher

_KERNEL = launcher.Launcher(w4a16_decode_kernel)


def plan(tile: tiles_decode.DecodeTile, call: Call) -> OneProduct:
    """Prepare a call of at most 16 tokens.

    Args:
        tile: how to cut the work.
        call: what to prepare for.
    """
    token_tiles = 1 if call.M <= tiles_decode.TOKENS else 2

    def cut() -> tiles_decode.DecodeCut:
        return tiles_decode.DecodeCut(
            token_tiles=token_tiles,
            row_warps=tile.row_warps,
            k_warps=tile.k_warps,
            split_k=tile.split_k,
            depth=tile.depth,
            x_depth=tile.x_depth,
            batch=tile.batch,
            fence=tile.fence,
        )

    return plan_rows(_KERNEL, tile, (1, token_tiles), call, cut)
