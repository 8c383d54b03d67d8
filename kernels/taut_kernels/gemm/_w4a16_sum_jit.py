"""The Triton kernel that adds up splits of K in a launch of its own, for the `wgmma` ring.

The program that arrives last reads every split's sums alone, some 5 to 15 µs of them with large
tiles; here every multiprocessor reads a share.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _store(y_ptr, bias_ptr, total, row, token, M, N, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    pointers = y_ptr + token[None, :].to(tl.int64) * N + row[:, None]
    tl.store(pointers, total.to(y_ptr.dtype.element_ty), mask=token[None, :] < M)


@triton.jit(do_not_specialize=["M"])
def sum_splits_kernel(
    partial_ptr,  # [tiles of y, SPLIT_K, …] fp32: [ROW_TILES, BLOCK_M / 8, lanes, 4]
    bias_ptr,  # [N]; unused without HAS_BIAS
    y_ptr,  # [M, rows], rows of N apart
    M,
    N,
    rows,  # of this launch
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,  # tokens a tile
    TOKENS: tl.constexpr,  # tokens a program, at most those
    WARPS: tl.constexpr,  # of the products
    ROW_TILES: tl.constexpr,  # of 16 rows a warp
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add one tile's splits in their order, for some of its tokens, and store them."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    LINES: tl.constexpr = 16 * WARPS
    SIZE: tl.constexpr = LINES * ROW_TILES * BLOCK_M
    pid, part, pid_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tile_of_y = pid_m * tl.num_programs(0) + pid
    tile_ptr = partial_ptr + tile_of_y.to(tl.int64) * (SPLIT_K * SIZE)
    token = pid_m * BLOCK_M + part * TOKENS + tl.arange(0, TOKENS)
    line = tl.arange(0, LINES)
    for r in tl.static_range(ROW_TILES):
        cell = tl.arange(0, TOKENS // 8)[:, None] * (8 * LINES) + tl.arange(0, 8 * LINES)[None]
        cell += r * (LINES * BLOCK_M) + part * (TOKENS * LINES)
        total = tl.zeros((TOKENS // 8, 8 * LINES), tl.float32)
        for s in tl.static_range(SPLIT_K):
            total += tl.load(tile_ptr + s * SIZE + cell, cache_modifier=".cg")
        # Eight tokens, warp, g, t, r, b: rows are (warp, r, g), tokens (eight, t, b).
        total = tl.reshape(total, (TOKENS // 8, WARPS, 8, 4, 2, 2))
        total = tl.reshape(tl.permute(total, (1, 4, 2, 0, 3, 5)), (LINES, TOKENS))
        # Spare rows repeat the last ones of y, as the sums do that were made for them.
        tile = tl.minimum((pid * WARPS + line // 16) * ROW_TILES, rows // 16 - ROW_TILES)
        row = (tile + r) * 16 + line % 16
        row = tl.max_contiguous(tl.multiple_of(row, 16), 16)
        _store(y_ptr, bias_ptr, total, row, token, M, N, HAS_BIAS)
