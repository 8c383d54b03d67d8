"""The kernel of `taut::w4a16_gemm` for some 16 to 64 tokens: a ring of shared memory.

Maths     as :mod:`.op`
Numerics  as :mod:`.decode`: q - z is exact, products accumulate in fp32
          within a group, scale and bias are applied in fp32, one rounding at the store.
          For one tile, the same bits from run to run: splits are added in a fixed order.
Limits    as :mod:`.op`, M ≤ 64
Source    The products of :mod:`.decode`; multi-stage `cp.async` as in
          "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on LLMs", arXiv:2408.11743.
          The rest is ours.
"""

from __future__ import annotations

from taut_kernels.gemm.w4a16.decode_ring_kernel import w4a16_decode_ring_kernel
from taut_kernels.gemm.w4a16.decode_ring_tile import MAX_TOKENS, Cut, RingTile, token_tiles
from taut_kernels.gemm.w4a16.plan import Call, OneProduct, plan_rows
from taut_kernels.launch import launcher

_KERNEL = launcher.Launcher(w4a16_decode_ring_kernel)


def plan(tile: RingTile, call: Call) -> OneProduct:
    """Prepare a call of at most 64 tokens.

    Args:
        tile: how to cut the work.
        call: what to prepare for.

    Raises:
        ValueError: more than 64 tokens.
    """
    if call.M > MAX_TOKENS:
        raise ValueError(f"x must have at most {MAX_TOKENS} rows for a ring tile, got {call.M}")
    row_tiles, tokens = min(tile.row_tiles, call.N // 16), token_tiles(call.M)

    def cut() -> Cut:
        return Cut(
            token_tiles=tokens,
            row_tiles=row_tiles,
            row_warps=tile.row_warps,
            chunks_per_step=tile.chunks_per_step,
            split_k=tile.split_k,
            stages=tile.stages_that_fit(tokens, call.group, has_zeros=call.has_zeros),
        )

    return plan_rows(_KERNEL, tile, (row_tiles, tokens), call, cut)
