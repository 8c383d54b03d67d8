"""The end of the ring kernel: sums across programs, and the store.

See :mod:`.decode_ring_kernel`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from taut_kernels.hopper import axis, barrier


@gluon.jit
def _store_rows(
    y_ptr,
    bias_ptr,
    value,  # [1, ROW_WARPS, 32, 4]
    tile,
    token_tile,
    lane,
    element,
    M,
    N,
    HAS_BIAS: gl.constexpr,
):
    """Store 16 rows × 8 tokens a warp where fragments put their elements."""
    row = tile * 16 + lane // 4 + 8 * (element // 2)
    token = token_tile * 8 + 2 * (lane % 4) + element % 2
    if HAS_BIAS:
        value += gl.load(bias_ptr + row).to(gl.float32)
    gl.store(y_ptr + (token * N + row), value.to(y_ptr.dtype.element_ty), mask=token < M)


@gluon.jit
def reduce_and_store(
    totals, y_ptr, bias_ptr, partial_ptr, arrivals_ptr, M, N, HAS_BIAS: gl.constexpr,
    TOKEN_TILES: gl.constexpr, ROW_TILES: gl.constexpr, ROW_WARPS: gl.constexpr,
    SPLIT_K: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Add the splits' totals in the program that arrives last, and store."""
    ROWS: gl.constexpr = gl.SliceLayout(1, L)
    pid, split = gl.program_id(0), gl.program_id(1)
    row_warp, lane = axis(1, ROW_WARPS, ROWS, 4), axis(2, 32, ROWS, 4)
    element = axis(3, 4, ROWS, 4)
    first_tile = gl.minimum((pid * ROW_WARPS + row_warp) * ROW_TILES, N // 16 - ROW_TILES)
    TILES: gl.constexpr = ROW_TILES * TOKEN_TILES
    SIZE: gl.constexpr = ROW_WARPS * 128
    cells = partial_ptr
    if SPLIT_K > 1:
        cells = partial_ptr + (pid * SPLIT_K * TILES * SIZE + row_warp * 128 + lane * 4 + element)
    for i in gl.static_range(TILES):
        value = gl.sum(totals[i], axis=1)
        if SPLIT_K == 1:
            tile = first_tile + i // TOKEN_TILES
            _store_rows(
                y_ptr, bias_ptr, value, tile, i % TOKEN_TILES, lane, element, M, N, HAS_BIAS
            )
        else:
            gl.store(cells + (split * TILES + i) * SIZE, value)
    if SPLIT_K > 1:
        # Every thread's partials are stored before one of them announces the program.
        barrier()
        arrived = gl.atomic_add(arrivals_ptr + pid, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT_K - 1:
            for i in gl.static_range(TILES):
                value = gl.full((1, ROW_WARPS, 32, 4), 0.0, gl.float32, ROWS)
                for s in gl.static_range(SPLIT_K):
                    # In order of the splits: the same bits from run to run. Past L1, which does
                    # not see what other programs store.
                    value += gl.load(cells + (s * TILES + i) * SIZE, cache_modifier=".cg")
                tile = first_tile + i // TOKEN_TILES
                _store_rows(
                    y_ptr, bias_ptr, value, tile, i % TOKEN_TILES, lane, element, M, N, HAS_BIAS
                )
            gl.store(arrivals_ptr + pid, 0)
