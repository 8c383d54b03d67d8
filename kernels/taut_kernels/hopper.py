"""Device code that several kernels of sm_90 share.

Copies and barriers, layouts of operands and sums, products of a warp group whose operand A is
registers, the order of tiles, and the sums of programs that share a tile.
"""

# ruff: noqa: RUF005 (Triton's front end adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.9 has the first name of each, 3.6 only the second.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_block = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_MEMORY = gl.shared_memory_descriptor
seen_as = getattr(_MEMORY, "reinterpret", None) or _MEMORY._reinterpret


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Make barriers, each of so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def barrier_pairs(COUNT: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr):
    """Make twice as many barriers, of FIRST and of SECOND arrivals.

    One of each in turn: between two of one allocation Triton 3.6 puts a `bar.sync`, some 30 clocks.
    """
    first = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    second = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(first.index(i), count=FIRST)
        mbarrier.init(second.index(i), count=SECOND)
    return first, second


@gluon.jit
def early_start(WAIT: gl.constexpr):
    """Let the next kernel start, or (WAIT) wait for the one in front to end."""
    TEXT: gl.constexpr = "griddepcontrol.wait;" if WAIT else "griddepcontrol.launch_dependents;"
    gl.inline_asm_elementwise(TEXT + " mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def row_major(rank):
    """Lay out shared memory without a swizzle, the last axis innermost."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(reversed(range(rank))))


@gluon.constexpr_function
def _axis_layout(axis, layout, rank):
    """Lay out one axis of a layout: every other one sliced away, the last outermost."""
    for other in reversed(range(rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def axis(AXIS: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr, RANK: gl.constexpr):
    """Return 0..SIZE-1 along one axis of a layout, every other axis of length 1."""
    value = gl.arange(0, SIZE, _axis_layout(AXIS, LAYOUT, RANK))
    for other in gl.static_range(RANK):
        if other != AXIS:
            value = gl.expand_dims(value, other)
    return value


@gluon.jit
def place(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """Return the token tile and the feature tile of the ``tile``-th output tile."""
    in_group = GROUP_M * tiles_n
    first_m = (tile // in_group) * GROUP_M
    group_m = gl.minimum(tiles_m - first_m, GROUP_M)
    inside = tile % in_group
    return first_m + inside % group_m, inside // group_m


@gluon.jit
def first_token(part, M, ROWS: gl.constexpr):
    """Return where the ``part``-th ROWS tokens begin: earlier where M ends within or before them.

    So some are computed twice, to the same bits. TMA takes several times as long to fill a row with
    zeros as to load one.
    """
    return gl.maximum(gl.minimum(part * ROWS, M - ROWS), 0)


@gluon.constexpr_function
def steps_of(chunks, chunks_a_step, split_k):
    """Count the steps of a program: at least two, since Triton 3.6 fails on a loop of one pass.

    An even number where a step is one chunk, so that a split begins with a group.
    """
    steps = max(2, -(-chunks // (chunks_a_step * split_k)))
    return steps + steps % 2 if chunks_a_step == 1 else steps


@gluon.constexpr_function
def sums_of(tokens, warps):
    """Return the layout of a row tile's sums with so many tokens."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, tokens, 16])


@gluon.jit
def no_sums(TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """Return a row tile's sums before its first product."""
    return gl.full((16 * WARPS, TOKENS), 0.0, gl.float32, sums_of(TOKENS, WARPS))


@gluon.jit
def wait_for_products(sums, RUNNING: gl.constexpr):
    """Wait until no more than RUNNING products are left."""
    after = warpgroup_mma_wait(RUNNING, deps=sums)
    if len(sums) == 1:
        after = (after,)
    return after


@gluon.jit
def multiply(sums, a, xs, r: gl.constexpr, RUNNING: gl.constexpr, WARPS: gl.constexpr):
    """Add a row tile's products with every part of the block, and wait for the ones before.

    Args:
        sums: of every row tile, by part of the block.
        a: the row tile's weights, as operand A of the first part.
        xs: the parts' activations, [K, tokens].
        r: which row tile.
        RUNNING: weights whose products may be left running.
        WARPS: that multiply.
    """
    after = ()
    for i in gl.static_range(len(sums)):
        total = sums[i]
        if i // len(xs) == r:
            # The same registers in every part's layout.
            operand = gl.convert_layout(
                a,
                gl.DotOperandLayout(0, sums_of(xs[i % len(xs)].shape[1], WARPS), 2),
                assert_trivial=True,
            )
            total = warpgroup_mma(operand, xs[i % len(xs)], total, is_async=True)
        after = after + (total,)
    return wait_for_products(after, RUNNING * len(xs))


@gluon.jit
def _rows(r, N, LAYOUT: gl.constexpr, ROW_TILES: gl.constexpr, WARPS: gl.constexpr, first_tile):
    """Return where a program's r-th row tiles lie in y, along axis 0 of a layout.

    Of a program whose first tile is not given spare row tiles repeat the last one; two warps then
    store equal values.
    """
    row = axis(0, 16 * WARPS, LAYOUT, 2)
    if first_tile is None:
        first = gl.program_id(0) * (WARPS * ROW_TILES)
        tile = gl.minimum(first + row // 16 * ROW_TILES, N // 16 - ROW_TILES)
    else:
        tile = first_tile + row // 16 * ROW_TILES
    return (tile + r) * 16 + row % 16


@gluon.jit
def piece_of(first_token, begin, M, PIECE: gl.constexpr):
    """Return the first token of the piece that begins so far into a block.

    Of tokens that exist: earlier where M ends within the piece. With M at most a piece all but the
    first are beyond M.
    """
    return first_token + gl.where(M > PIECE, gl.minimum(M - PIECE, begin), begin)


@gluon.jit
def _store_tile(
    y_ptr,
    bias_ptr,
    value,  # [16 · WARPS, BLOCK_M]
    r,
    M,
    N,
    HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    ROW_TILES: gl.constexpr,
    WARPS: gl.constexpr,
    ACC: gl.constexpr,
    first_tile,  # of 16 rows, or None: the program's place
    first_token,  # of the block, or None: the program's place
    BEGIN: gl.constexpr,  # in the block, of the part stored here
    PIECE: gl.constexpr,  # tokens of the block that lie behind each other
):
    # 16 bytes a lane.
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [2 * WARPS, 16 // WARPS], [1, WARPS], [0, 1])
    if HAS_BIAS:
        value += gl.load(bias_ptr + _rows(r, N, ACC, ROW_TILES, WARPS, first_tile)).to(gl.float32)
    value = gl.convert_layout(value.to(y_ptr.dtype.element_ty), STORED)
    row = _rows(r, N, STORED, ROW_TILES, WARPS, first_tile)
    token = axis(1, BLOCK_M, STORED, 2)
    if first_token is None:
        token += gl.program_id(2) * BLOCK_M
    else:
        token = token % PIECE + piece_of(first_token, BEGIN + token // PIECE * PIECE, M, PIECE)
    gl.store(y_ptr + (token.to(gl.int64) * N + row), value, mask=token < M)


@gluon.jit
def _by_register(value, WARPS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Bring sums into [BLOCK_M/8, 32 · WARPS lanes, 4 registers]: a lane's four lie together."""
    value = gl.reshape(value, (WARPS, 2, 8, BLOCK_M // 8, 4, 2))
    value = gl.permute(value, (3, 0, 2, 4, 1, 5))
    return gl.reshape(value, (BLOCK_M // 8, 32 * WARPS, 4))


@gluon.jit
def _by_row(value, WARPS: gl.constexpr, BLOCK_M: gl.constexpr, ACC: gl.constexpr):
    """Undo _by_register."""
    value = gl.reshape(value, (BLOCK_M // 8, WARPS, 8, 4, 2, 2))
    value = gl.permute(value, (1, 4, 2, 0, 3, 5))
    value = gl.reshape(value, (16 * WARPS, BLOCK_M))
    return gl.convert_layout(value, ACC, assert_trivial=True)


@gluon.jit
def reduce_and_store(
    sums,  # ROW_TILES of [16 · WARPS, BLOCK_M]
    y_ptr,
    bias_ptr,
    partial_ptr,
    arrivals_ptr,
    M,
    N,
    HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    ROW_TILES: gl.constexpr,
    WARPS: gl.constexpr,
    SPLIT_K: gl.constexpr,
    ACC: gl.constexpr,
    first_tile=None,
    first_token=None,
    BEGIN: gl.constexpr = 0,
    PIECE: gl.constexpr = 0,
):
    """Store, or add the splits' sums in the program that arrives last and store those."""
    pid, split = gl.program_id(0), gl.program_id(1)
    if SPLIT_K == 1:
        for r in gl.static_range(ROW_TILES):
            _store_tile(
                y_ptr, bias_ptr, sums[r], r, M, N, HAS_BIAS, BLOCK_M, ROW_TILES, WARPS, ACC,
                first_tile, first_token, BEGIN, PIECE,
            )  # fmt: skip
    else:
        SIZE: gl.constexpr = 16 * WARPS * BLOCK_M
        tile_of_y = gl.program_id(2) * gl.num_programs(0) + pid
        CELLS: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, WARPS, 1], [2, 1, 0])
        cell = axis(0, BLOCK_M // 8, CELLS, 3) * (128 * WARPS)
        cell = cell + axis(1, 32 * WARPS, CELLS, 3) * 4 + axis(2, 4, CELLS, 3)
        cells = partial_ptr + (tile_of_y * (SPLIT_K * ROW_TILES * SIZE) + cell)
        for r in gl.static_range(ROW_TILES):
            part = gl.convert_layout(
                _by_register(sums[r], WARPS, BLOCK_M), CELLS, assert_trivial=True
            )
            gl.store(cells + (split * ROW_TILES + r) * SIZE, part)
        # Every thread's partials are stored before one of them announces the program.
        barrier()
        arrived = gl.atomic_add(arrivals_ptr + tile_of_y, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT_K - 1:
            for r in gl.static_range(ROW_TILES):
                value = gl.full((BLOCK_M // 8, 32 * WARPS, 4), 0.0, gl.float32, CELLS)
                for s in gl.static_range(SPLIT_K):
                    # In order of the splits: the same bits from run to run. Past L1, which
                    # does not see what other programs store.
                    value += gl.load(cells + (s * ROW_TILES + r) * SIZE, cache_modifier=".cg")
                value = _by_row(value, WARPS, BLOCK_M, ACC)
                _store_tile(
                    y_ptr, bias_ptr, value, r, M, N, HAS_BIAS, BLOCK_M, ROW_TILES, WARPS, ACC,
                    first_tile, first_token, BEGIN, PIECE,
                )  # fmt: skip
            gl.store(arrivals_ptr + tile_of_y, 0)
