"""A tile of the `wgmma` kernels: weights converted to operand A, sums that meet, and the store."""

# ruff: noqa: RUF005 (Triton's front end adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from taut_kernels.gemm.w4a16.tile_ptx import part_constraints, part_ptx
from taut_kernels.hopper.barriers import barrier
from taut_kernels.hopper.layouts import axis


@gluon.constexpr_function
def _outputs(element, count):
    return (gl.bfloat16 if element == "bf16" else gl.float16,) * count


@gluon.jit
def convert(
    operands,  # of load_operands
    part: gl.constexpr,
    PARTS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    ELEMENT: gl.constexpr,
    WARPS: gl.constexpr,
    OPERAND: gl.constexpr,
):
    """Return a part of a chunk of one 16-row tile a warp, [16 · WARPS, 64/PARTS], as operand A."""
    TEXT: gl.constexpr = part_ptx(ELEMENT, HAS_ZEROS, part, PARTS)
    CONSTRAINTS: gl.constexpr = part_constraints(HAS_ZEROS, PARTS)
    KINDS: gl.constexpr = _outputs(ELEMENT, 8 // PARTS)
    inputs = operands
    if PARTS > 1:
        # The offsets (if any) and the scale word of the part's half.
        HALF: gl.constexpr = part * 2 // PARTS
        inputs = (operands[0],)
        for word in gl.static_range(2 if HAS_ZEROS else 1):
            inputs = inputs + (operands[1 + 2 * word + HALF],)
    o = gl.inline_asm_elementwise(TEXT, CONSTRAINTS, inputs, KINDS, is_pure=True, pack=4)
    # Each join adds the innermost axis: j, then i, then h; an output's four are (r, b).
    if PARTS == 4:
        a = gl.reshape(gl.join(o[0], o[1]), (WARPS, 8, 4, 2, 2, 2, 1, 1))
    elif PARTS == 2:
        a = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))
        a = gl.reshape(a, (WARPS, 8, 4, 2, 2, 2, 2, 1))
    else:
        first = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))
        second = gl.join(gl.join(o[4], o[5]), gl.join(o[6], o[7]))
        a = gl.reshape(gl.join(first, second), (WARPS, 8, 4, 2, 2, 2, 2, 2))
    # (warp, g, t, r, b, j, i, h): rows are (warp, r, g), positions along K (h, i, j, t, b).
    a = gl.permute(a, (0, 3, 1, 7, 6, 5, 2, 4))
    a = gl.reshape(a, (16 * WARPS, 64 // PARTS))
    return gl.convert_layout(a, OPERAND, assert_trivial=True)


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


@gluon.constexpr_function
def steps_of(chunks, chunks_a_step, split_k):
    """Count the steps of a program: at least two, since Triton 3.6 fails on a loop of one pass.

    An even number where a step is one chunk, so that a split begins with a group.
    """
    steps = max(2, -(-chunks // (chunks_a_step * split_k)))
    return steps + steps % 2 if chunks_a_step == 1 else steps
