"""The Gluon kernel of :mod:`.tma`.

The products are those of :mod:`.ring_kernel`; what feeds them is TMA: a
warp of its own asks for every step's weights and activations, which land as the tensors have them,
rows of 128 bytes, swizzled. A matrix load (`ldmatrix`) then hands lane (g, t) word t of the four
lanes of row g: columns 2t and 2t + 1 of every eight, which is what `wgmma` multiplies with
activations in their own order. Scales come through registers, a step ahead, from L2.

Rows of activations beyond M would come as zeros, and TMA takes several times as long to fill a row
with zeros as to load one (README). So a program's tokens are some pieces of a block, each of tokens
that exist: a piece begins earlier where M ends within it, and so does the last of several blocks.
Tokens that two pieces have in common are computed twice, to the same bits.

Gluon's tensors are powers of two. So a block that is none has two parts: all pieces but one, and
that one (192 tokens are 128 and 64, 288 are eight pieces of 32 and a ninth). Two products with the
same converted weights, each with sums of its own.

Triton's interpreter runs neither Gluon nor inline assembly; only a GPU runs this file.
"""

# ruff: noqa: RUF005 (Triton's front end adds tuples and does not unpack them; a kernel's
# branches fall at compile time)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from taut_kernels.gemm.w4a16.int4_jit import (
    convert,
    groups_of,
    load_scales,
    load_zeros,
    operands_of,
    prefetch,
    scale_ptrs_of,
    whole_quads,
    zero_places,
)
from taut_kernels.hopper import (
    barrier_pairs,
    early_start,
    load_block,
    multiply,
    no_sums,
    piece_of,
    place,
    reduce_and_store,
    seen_as,
    steps_of,
    sums_of,
    wait_for_products,
)


@gluon.constexpr_function
def _bits(count):
    """Return how many bits count to a power of two."""
    return count.bit_length() - 1


@gluon.constexpr_function
def word_layout(row_tiles, warps, chunks):
    """Lay out a step's words [warps · row_tiles, 4 · chunks, 32] as operand A wants them.

    Columns of a row are (g's lowest bit, lane t of memory, word), rows of a chunk g's other bits. A
    lane (g, t) takes word t of all four lanes of its g: four registers, then those of other chunks,
    then of other row tiles.
    """
    registers = [[0, 0, 4], [0, 0, 8]]
    registers += [[0, 4 << bit, 0] for bit in range(_bits(chunks))]
    registers += [[1 << bit, 0, 0] for bit in range(_bits(row_tiles))]
    lanes = [[0, 0, 1], [0, 0, 2], [0, 0, 16], [0, 1, 0], [0, 2, 0]]
    of_warps = [[row_tiles << bit, 0, 0] for bit in range(_bits(warps))]
    shape = [warps * row_tiles, 4 * chunks, 32]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], shape)


@gluon.jit
def _split_words(words, TILES: gl.constexpr, WARPS: gl.constexpr):
    """Return TILES tensors, one for each place along the last axis."""
    if TILES == 1:
        parts = (gl.reshape(words, (1, 1, WARPS, 32, 4)),)
    elif TILES == 2:
        parts = gl.split(words)
    else:
        halves = gl.split(gl.reshape(words, (1, 1, WARPS, 32, 4, TILES // 2, 2)))
        even = _split_words(halves[0], TILES // 2, WARPS)
        odd = _split_words(halves[1], TILES // 2, WARPS)
        parts = ()
        for i in gl.static_range(TILES // 2):
            parts = parts + (even[i], odd[i])
    return parts


@gluon.jit
def load_words(
    slot, ROW_TILES: gl.constexpr, WARPS: gl.constexpr, CHUNKS: gl.constexpr, L: gl.constexpr
):
    """Return the words of every chunk of every row tile of a step, [1, 1, WARPS, 32, 4] each."""
    TILES: gl.constexpr = CHUNKS * ROW_TILES
    LAYOUT: gl.constexpr = word_layout(ROW_TILES, WARPS, CHUNKS)
    value = slot.load(LAYOUT)
    # warp, r, chunk, g's upper bits, g's lowest, lane of memory, t.
    value = gl.reshape(value, (WARPS, ROW_TILES, CHUNKS, 4, 2, 4, 4))
    value = gl.permute(value, (0, 3, 4, 6, 5, 2, 1))
    value = gl.reshape(value, (1, 1, WARPS, 32, 4, TILES))
    found = _split_words(value, TILES, WARPS)
    result = ()
    for i in gl.static_range(TILES):
        result = result + (gl.convert_layout(found[i], L, assert_trivial=True),)
    return result


@gluon.jit
def _blocks(M, BLOCK_M: gl.constexpr, GROUP_M: gl.constexpr):
    """Return which block of rows and which of tokens a program computes.

    With GROUP_M programs that run at once share blocks of either: GROUP_M blocks of tokens side by
    side, then the next rows. Without it all rows of a block of tokens come first, and what runs at
    once reads as many weights as it has programs.
    """
    if GROUP_M == 0:
        rows, tokens = gl.program_id(0), gl.program_id(2)
    else:
        count = (M + BLOCK_M - 1) // BLOCK_M
        tokens, rows = place(gl.program_id(0), count, gl.num_programs(0) // count, GROUP_M)
    return rows, tokens


@gluon.jit
def _first_tile(rows, N, ROW_TILES: gl.constexpr, WARPS: gl.constexpr):
    """Return a block's first tile of 16 rows; the last block repeats some of the one before."""
    return gl.minimum(rows * (WARPS * ROW_TILES), N // 16 - WARPS * ROW_TILES)


@gluon.jit
def _ask_weights(w_desc, words, full, slot, stage, first_tile, first_chunk, CHUNKS: gl.constexpr):
    """Ask for a step's weights."""
    row = (first_chunk + stage * CHUNKS) * 4
    load_block(w_desc, [first_tile, row, 0], full.index(slot), words.index(slot))


@gluon.jit
def _first_token(block, M, BLOCK_M: gl.constexpr):
    """Return where a block of tokens begins."""
    return gl.minimum(block * BLOCK_M, gl.where(M > BLOCK_M, M - BLOCK_M, 0))


@gluon.jit
def _ask_tokens(
    x_desc, rings, pieces, slot, stage, first_tokens, first_chunk, CHUNKS: gl.constexpr
):
    """Ask for a step's activations, a piece of a block of a chunk at a time."""
    _, tokens, full, _ = rings
    TOGETHER: gl.constexpr = pieces.shape[0] // tokens[0].shape[0]
    for c in gl.static_range(CHUNKS):
        column = (first_chunk + stage * CHUNKS + c) * 64
        for i in gl.static_range(len(first_tokens)):
            if i < TOGETHER:
                place = pieces.index((slot * CHUNKS + c) * TOGETHER + i)
            else:
                place = tokens[1].index(slot * CHUNKS + c)
            load_block(x_desc, [first_tokens[i], column], full.index(slot), place)


@gluon.jit
def _ask(
    x_desc, w_desc, rings, pieces, M, first_tile, block, first_chunk,
    STEPS: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Run the warp that asks for every step's weights and activations."""
    words, tokens, full, empty = rings
    STAGES: gl.constexpr = words.shape[0]
    CHUNKS: gl.constexpr = tokens[0].shape[0] // STAGES
    PIECE: gl.constexpr = pieces.shape[1]
    BYTES: gl.constexpr = CHUNKS * (128 * words.shape[1] * 4 + 128 * PIECES * PIECE)
    first_token = _first_token(block, M, PIECES * PIECE)
    first_tokens = (first_token,)
    for i in gl.static_range(1, PIECES):
        first_tokens = first_tokens + (piece_of(first_token, i * PIECE, M, PIECE),)
    FIRST: gl.constexpr = STAGES if STAGES < STEPS else STEPS
    for stage in gl.static_range(FIRST):
        mbarrier.expect(full.index(stage), BYTES)
        _ask_weights(w_desc, words, full, stage, stage, first_tile, first_chunk, CHUNKS)
    # The first weights, which nobody writes while serving, are on their way: now wait for the
    # kernel that makes the activations.
    early_start(True)
    for stage in gl.static_range(FIRST):
        _ask_tokens(x_desc, rings, pieces, stage, stage, first_tokens, first_chunk, CHUNKS)
    slot, phase = 0, 0
    for step in range(STAGES, STEPS):
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(full.index(slot), BYTES)
        _ask_weights(w_desc, words, full, slot, step, first_tile, first_chunk, CHUNKS)
        _ask_tokens(x_desc, rings, pieces, slot, step, first_tokens, first_chunk, CHUNKS)
        phase = gl.where(slot + 1 == STAGES, phase ^ 1, phase)
        slot = gl.where(slot + 1 == STAGES, 0, slot + 1)


@gluon.jit
def _multiply_all(
    rings, scale_ptrs, zero_ptrs, first_chunk, K: gl.constexpr, GROUP_SIZE: gl.constexpr,
    HAS_ZEROS: gl.constexpr, ROW_TILES: gl.constexpr, WARPS: gl.constexpr, STEPS: gl.constexpr,
    PARTS: gl.constexpr, RUNNING: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Return the sums over a program's steps, of every row tile by part of the block."""
    words, tokens, full, empty = rings
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, sums_of(tokens[0].shape[1], WARPS), 2)
    ELEMENT: gl.constexpr = "bf16" if tokens[0].dtype == gl.bfloat16 else "f16"
    STAGES: gl.constexpr = words.shape[0]
    CHUNKS: gl.constexpr = tokens[0].shape[0] // STAGES
    GROUPS: gl.constexpr = groups_of(CHUNKS, GROUP_SIZE)
    # Scales come through registers, a step ahead; a channel's only one stays.
    scales = load_scales(scale_ptrs, first_chunk, GROUPS, GROUP_SIZE, K, ROW_TILES)
    zeros = ()
    if HAS_ZEROS:
        zeros = load_zeros(zero_ptrs, first_chunk, CHUNKS, GROUP_SIZE, K, ROW_TILES)
    sums = ()
    for _ in gl.static_range(ROW_TILES):
        for p in gl.static_range(len(tokens)):
            sums = sums + (no_sums(tokens[p].shape[1], WARPS),)
    slot, phase = 0, 0
    for step in range(STEPS):
        now, zeros_now = scales, zeros
        place = zero_places(
            first_chunk, step, CHUNKS, GROUP_SIZE, whole_quads(CHUNKS, GROUP_SIZE), L
        )
        if GROUP_SIZE:
            ahead = first_chunk + (step + 1) * CHUNKS
            scales = load_scales(scale_ptrs, ahead, GROUPS, GROUP_SIZE, K, ROW_TILES)
            if HAS_ZEROS:
                zeros = load_zeros(zero_ptrs, ahead, CHUNKS, GROUP_SIZE, K, ROW_TILES)
        mbarrier.wait(full.index(slot), phase)
        every = load_words(words.index(slot), ROW_TILES, WARPS, CHUNKS, L)
        for i in gl.static_range(CHUNKS * ROW_TILES * PARTS):
            xs = ()
            for p in gl.static_range(len(tokens)):
                x = tokens[p].index(slot * CHUNKS + i // PARTS // ROW_TILES).permute((1, 0))
                xs = xs + (x.slice(i % PARTS * (64 // PARTS), 64 // PARTS, 0),)
            operands = operands_of(
                every[i // PARTS], zeros_now, now, place, i // PARTS // ROW_TILES,
                i // PARTS % ROW_TILES, GROUP_SIZE, HAS_ZEROS, ELEMENT, ROW_TILES,
            )  # fmt: skip
            a = convert(operands, i % PARTS, PARTS, HAS_ZEROS, ELEMENT, WARPS, OPERAND)
            sums = multiply(sums, a, xs, i // PARTS % ROW_TILES, RUNNING, WARPS)
            if i == RUNNING - 1:
                # All products of the step before are done: its place may be filled again.
                before = gl.where(slot == 0, STAGES - 1, slot - 1)
                mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
        phase = gl.where(slot + 1 == STAGES, phase ^ 1, phase)
        slot = gl.where(slot + 1 == STAGES, 0, slot + 1)
    return wait_for_products(sums, 0)


@gluon.jit
def _product(
    rings,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    y_ptr,
    partial_ptr,
    arrivals_ptr,
    M,
    N,
    first_tile,
    block,  # of tokens
    first_chunk,
    K: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    CUT: gl.constexpr,
    STEPS: gl.constexpr,
    PIECE: gl.constexpr,
):
    """Run the warps that multiply and store."""
    ROW_TILES: gl.constexpr = CUT.row_tiles
    WARPS: gl.constexpr = CUT.warps
    PIECES: gl.constexpr = CUT.pieces
    L: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1, 4], [1, 1, 1, 32, 1], [1, 1, WARPS, 1, 1], [4, 3, 2, 1, 0]
    )
    ALL_QUADS: gl.constexpr = (K // GROUP_SIZE + 3) // 4 if GROUP_SIZE else 1
    scale_ptrs = scale_ptrs_of(scales_ptr, first_tile, 4, ALL_QUADS, ROW_TILES, WARPS, L)
    zero_ptrs = scale_ptrs
    if HAS_ZEROS:
        zero_ptrs = scale_ptrs_of(zeros_ptr, first_tile, 1, ALL_QUADS, ROW_TILES, WARPS, L)
    if GROUP_SIZE:
        CHUNKS: gl.constexpr = STEPS * (rings[1][0].shape[0] // rings[0].shape[0])
        TILES: gl.constexpr = ROW_TILES * WARPS
        prefetch(scales_ptr, first_tile, first_chunk, 4, CHUNKS, K, GROUP_SIZE, TILES, WARPS)
        if HAS_ZEROS:
            prefetch(zeros_ptr, first_tile, first_chunk, 1, CHUNKS, K, GROUP_SIZE, TILES, WARPS)
    sums = _multiply_all(
        rings, scale_ptrs, zero_ptrs, first_chunk, K, GROUP_SIZE, HAS_ZEROS, ROW_TILES, WARPS,
        STEPS, CUT.parts, CUT.running, L,
    )  # fmt: skip
    # The kernel in front has ended (its results were multiplied), but what these threads write is
    # theirs to order: arrivals, partial sums and y may be what it used.
    early_start(True)
    first_token = _first_token(block, M, PIECES * PIECE)
    OF_BLOCK: gl.constexpr = len(rings[1])
    for p in gl.static_range(OF_BLOCK):
        of_part = ()
        for r in gl.static_range(ROW_TILES):
            of_part = of_part + (sums[r * OF_BLOCK + p],)
        reduce_and_store(
            of_part, y_ptr, bias_ptr, partial_ptr, arrivals_ptr, M, N, HAS_BIAS,
            rings[1][p].shape[1], ROW_TILES, WARPS, CUT.split_k,
            sums_of(rings[1][p].shape[1], WARPS), first_tile, first_token,
            (PIECES - 1) * PIECE if p else 0, PIECE,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["M"])
def w4a16_wgmma_tma_kernel(
    scales_ptr,  # [N/16, quads, 8, 4, 2], read as words of two
    zeros_ptr,  # [N/16, quads, 8] int32; unused without HAS_ZEROS
    bias_ptr,  # [N]; unused without HAS_BIAS
    y_ptr,  # [M, N], contiguous
    partial_ptr,  # [tiles of y, SPLIT_K, ROW_TILES, BLOCK_M/8, 128 · WARPS] fp32
    arrivals_ptr,  # [tiles of y or more] int32, 0 before and after; both unused with SPLIT_K = 1
    x_desc,  # [M, K] in blocks [BLOCK_M / PIECES, 64]
    w_desc,  # [N/16, K/16, 32] int32 in blocks [WARPS · ROW_TILES, 4 · CHUNKS_PER_STEP, 32]
    M,
    N,
    K: gl.constexpr,
    GROUP_SIZE: gl.constexpr,  # 32, 64, 128, or 0 for one group a channel
    HAS_ZEROS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    CUT: gl.constexpr,  # of :mod:`.ring_tile`
):
    ROW_TILES: gl.constexpr = CUT.row_tiles
    WARPS: gl.constexpr = CUT.warps
    CHUNKS_PER_STEP: gl.constexpr = CUT.chunks_per_step
    STAGES: gl.constexpr = CUT.stages
    PIECES: gl.constexpr = CUT.pieces
    STEPS: gl.constexpr = steps_of(K // 64, CHUNKS_PER_STEP, CUT.split_k)
    early_start(False)
    words = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_shape, w_desc.layout)
    CHUNKS: gl.constexpr = STAGES * CHUNKS_PER_STEP
    PIECE: gl.constexpr = x_desc.block_shape[0]
    TOGETHER: gl.constexpr = PIECES - PIECES % 2
    pieces = gl.allocate_shared_memory(x_desc.dtype, [TOGETHER * CHUNKS, PIECE, 64], x_desc.layout)
    # Rows of 128 bytes: pieces behind each other are a part of the block.
    tokens = (seen_as(pieces, x_desc.dtype, [CHUNKS, TOGETHER * PIECE, 64], x_desc.layout),)
    if TOGETHER < PIECES:
        last = gl.allocate_shared_memory(x_desc.dtype, [CHUNKS, PIECE, 64], x_desc.layout)
        tokens = tokens + (last,)
    full, empty = barrier_pairs(STAGES, 1, 1)
    rings = (words, tokens, full, empty)
    hopper.fence_async_shared()
    first_chunk = gl.program_id(1) * (STEPS * CHUNKS_PER_STEP)
    rows, block = _blocks(M, PIECES * PIECE, CUT.group_m)
    first_tile = _first_tile(rows, N, ROW_TILES, WARPS)
    gl.warp_specialize(
        [
            (
                _product,
                (
                    rings, scales_ptr, zeros_ptr, bias_ptr, y_ptr, partial_ptr, arrivals_ptr, M, N,
                    first_tile, block, first_chunk, K, GROUP_SIZE, HAS_ZEROS, HAS_BIAS, CUT, STEPS,
                    PIECE,
                ),
            ),
            (
                _ask,
                (
                    x_desc, w_desc, rings, pieces, M, first_tile, block, first_chunk, STEPS, PIECES,
                ),
            ),
        ],
        [1],
        # Nine places of pieces want more registers.
        [24 if PIECES < 9 else 40],
    )  # fmt: skip
