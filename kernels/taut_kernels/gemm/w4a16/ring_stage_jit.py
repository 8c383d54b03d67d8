"""One stage of the ring kernel: its copies and its products.

See :mod:`.decode_ring_kernel`.
"""

# ruff: noqa: RUF005 (Triton's front end adds tuples and does not unpack them; a kernel's
# branches fall at compile time)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from taut_kernels.gemm.w4a16.decode_ptx import SCALE_CONSTRAINTS, scale_ptx
from taut_kernels.gemm.w4a16.decode_ring_ptx import (
    RING_MULTIPLY_CONSTRAINTS,
    ring_convert_constraints,
    ring_convert_ptx,
    ring_multiply_ptx,
)
from taut_kernels.gemm.w4a16.int4_jit import zero_offsets
from taut_kernels.hopper import copy


@gluon.jit
def copy_stage(
    slots,  # the stage's weights, scales, zero points and activations
    step,
    weights,  # of word_addresses, scale_addresses and zero_addresses
    CHUNKS: gl.constexpr,
    STEP_CHUNKS: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    QUADS: gl.constexpr,  # of whole_quads
    HAS_ZEROS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Ask for a stage's weights, scales and zero points.

    One copy each: Triton sets a barrier between two copies into the same allocation.
    """
    words, scales, zeros = weights
    ptrs = words[0] + step * (STEP_CHUNKS * 128)
    if MASKED:
        mask = words[1] + step * STEP_CHUNKS < CHUNKS
        copy(slots[0], ptrs, mask=mask, cache_modifier=".cg")
    else:
        copy(slots[0], ptrs, cache_modifier=".cg")
    if GROUP_SIZE:
        COLUMNS: gl.constexpr = GROUP_SIZE * 4 if QUADS else GROUP_SIZE
        line = scales[1] + step * (STEP_CHUNKS * 64 // COLUMNS)
        offset = line * 32 if QUADS else (line // 4) * 32 + line % 4
        if MASKED:
            # A quad's groups beyond K are zeros (taut_kernels.gemm.w4a16.layout).
            mask = line * COLUMNS < CHUNKS * 64
            copy(slots[1], scales[0] + offset, mask=mask)
        else:
            copy(slots[1], scales[0] + offset)
        if HAS_ZEROS:
            _copy_zeros(slots[2], step, zeros, CHUNKS, STEP_CHUNKS, GROUP_SIZE, MASKED)


@gluon.jit
def _copy_zeros(
    slot,
    step,
    zeros,  # of zero_addresses
    CHUNKS: gl.constexpr,
    STEP_CHUNKS: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Ask for a stage's zero points, whole quads."""
    QUAD_CHUNKS: gl.constexpr = GROUP_SIZE // 16
    if STEP_CHUNKS % QUAD_CHUNKS:
        quad = (zeros[1] + step * STEP_CHUNKS) // QUAD_CHUNKS
    else:
        quad = zeros[1] // QUAD_CHUNKS + step * (STEP_CHUNKS // QUAD_CHUNKS)
    ptrs = zeros[0] + quad * 8
    if MASKED:
        mask = (quad + zeros[2]) * QUAD_CHUNKS < CHUNKS
        copy(slot, ptrs, mask=mask, cache_modifier=".cg")
    else:
        copy(slot, ptrs, cache_modifier=".cg")


@gluon.jit
def copy_activations(
    x_slot,
    step,
    activations,  # of activation_addresses
    CHUNKS: gl.constexpr,
    STEP_CHUNKS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Ask for a stage's activations."""
    ptrs = activations[0] + step * (STEP_CHUNKS * 32)
    if MASKED:
        mask = activations[1] + step * STEP_CHUNKS < CHUNKS
        copy(x_slot, ptrs, mask=mask, cache_modifier=".cg")
    else:
        copy(x_slot, ptrs, cache_modifier=".cg")


@gluon.jit
def load_activations(
    x,  # stages of even steps and of odd ones
    activations,
    STAGES: gl.constexpr,  # how many
    CHUNKS: gl.constexpr,
    STEP_CHUNKS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Bring the first stages' activations to shared memory through registers."""
    values = ()
    for stage in gl.static_range(STAGES):
        ptrs = activations[0] + stage * (STEP_CHUNKS * 32)
        if MASKED:
            mask = activations[1] + stage * STEP_CHUNKS < CHUNKS
            value = gl.load(ptrs, mask=mask, other=0)
        else:
            value = gl.load(ptrs)
        values = values + (value,)
    for stage in gl.static_range(STAGES):
        x[stage % 2].index(stage // 2).store(values[stage])


@gluon.jit
def lane_word(
    slot,
    COLUMN: gl.constexpr,  # of the warp's chunks in this stage
    ROW_TILE: gl.constexpr,
    ROW_TILES: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    QUADS: gl.constexpr,  # of whole_quads
    L: gl.constexpr,
):
    """Read a lane's scale word for the group of a column, for all four elements."""
    GROUP: gl.constexpr = COLUMN // GROUP_SIZE
    LANES: gl.constexpr = gl.SliceLayout(4, L)
    if QUADS:
        word = _word_of_quad(slot, GROUP // 4 * ROW_TILES + ROW_TILE, GROUP % 4, 4, LANES)
    else:
        word = slot.slice(GROUP * ROW_TILES + ROW_TILE, 1, 0).load(LANES)
    return gl.expand_dims(word, 4)


@gluon.jit
def lane_offsets(
    slot,
    place,  # of zero_places
    COLUMN: gl.constexpr,  # of the warp's chunks in this stage
    ROW_TILE: gl.constexpr,
    ROW_TILES: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    ELEMENT: gl.constexpr,
    L: gl.constexpr,
):
    """Read a lane's zero points for the group of a column, as offsets for all four elements."""
    GROUP: gl.constexpr = COLUMN // GROUP_SIZE
    LINE: gl.constexpr = GROUP // 4 * ROW_TILES + ROW_TILE
    words = gl.expand_dims(_word_of_quad(slot, LINE, 0, 1, gl.SliceLayout(4, L)), 4)
    return zero_offsets(words, place + GROUP % 4, ELEMENT)


@gluon.jit
def _word_of_quad(
    slot,
    LINE: gl.constexpr,
    WORD: gl.constexpr,
    WORDS: gl.constexpr,  # for two rows: a group's scales a word, all zero points one
    LANES: gl.constexpr,
):
    """Read eight words of a quad, each for four lanes."""
    ROW_WARPS: gl.constexpr = slot.shape[2]
    EIGHT: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1, 1], [1, 1, 1, 8, 4], [1, 1, ROW_WARPS, 1, 1], [4, 3, 2, 1, 0]
    )
    lines = slot.reshape([slot.shape[0], 1, ROW_WARPS, 8, WORDS])
    word = lines.slice(LINE, 1, 0).slice(WORD, 1, 4).load(EIGHT)
    word = word + gl.full([1, 1, ROW_WARPS, 8, 4], 0, gl.int32, EIGHT)  # to all four lanes
    word = gl.reshape(word, (1, 1, ROW_WARPS, 32))
    return gl.convert_layout(word, LANES, assert_trivial=True)


@gluon.jit
def _multiply_chunk(
    weights,  # of every row tile, four MMA steps each
    x_slot,
    sums,
    FIRST: gl.constexpr,  # the chunk half's first fragment
    HALF: gl.constexpr,
    TOKEN_TILES: gl.constexpr,
    ELEMENT: gl.constexpr,
    L: gl.constexpr,
):
    """Add half a chunk of every row tile to ``sums``."""
    MULTIPLY: gl.constexpr = ring_multiply_ptx(ELEMENT)
    SHARED: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, L))
    values = ()
    for t in gl.static_range(TOKEN_TILES):
        fragment = x_slot.slice(FIRST + t, 1, 0)
        value = gl.expand_dims(fragment.load(SHARED), 1)
        values = values + (gl.expand_dims(value, 0),)
    result = ()
    for i in gl.static_range(len(sums)):
        total = gl.inline_asm_elementwise(
            MULTIPLY,
            RING_MULTIPLY_CONSTRAINTS,
            (
                weights[i // TOKEN_TILES * 4 + 2 * HALF],
                weights[i // TOKEN_TILES * 4 + 2 * HALF + 1],
                values[i % TOKEN_TILES],
                sums[i],
            ),
            gl.float32,
            is_pure=True,
            pack=4,
        )
        result = result + (total,)
    return result


@gluon.constexpr_function
def _closes(end, group_size):
    """Say whether a group ends before a column; without a size none does."""
    return group_size != 0 and end % group_size == 0


@gluon.jit
def multiply_chunks(
    sums,  # of the open group, ROW_TILES · TOKEN_TILES
    totals,  # scaled sums of the closed groups, likewise
    slots,  # the stage's weights, scales, zero points and activations
    place,  # of zero_places
    channel_zeros,  # of channel_offsets, without GROUP_SIZE
    CHUNKS: gl.constexpr,  # of this stage
    ROW_TILES: gl.constexpr,
    TOKEN_TILES: gl.constexpr,
    GROUP_SIZE: gl.constexpr,  # 0: one group a channel, never closed here
    QUADS: gl.constexpr,  # of whole_quads
    HAS_ZEROS: gl.constexpr,
    ELEMENT: gl.constexpr,
    L: gl.constexpr,
):
    """Multiply a stage's chunks, and close the groups that end there."""
    CONVERT: gl.constexpr = ring_convert_ptx(ELEMENT, HAS_ZEROS)
    CONVERT_CONSTRAINTS: gl.constexpr = ring_convert_constraints(HAS_ZEROS)
    SCALE: gl.constexpr = scale_ptx(ELEMENT, 0)
    for c in gl.static_range(CHUNKS):
        weights = ()
        for r in gl.static_range(ROW_TILES):
            operands = (slots[0].slice(c * ROW_TILES + r, 1, 0).load(L),)
            if HAS_ZEROS:
                for h in gl.static_range(2):
                    if GROUP_SIZE:
                        zero = lane_offsets(
                            slots[2], place, 64 * c + 32 * h, r, ROW_TILES, GROUP_SIZE, ELEMENT, L
                        )
                        operands = operands + (zero,)
                    else:
                        operands = operands + (channel_zeros[r],)
            weights = weights + gl.inline_asm_elementwise(
                CONVERT,
                CONVERT_CONSTRAINTS,
                operands,
                (gl.int32, gl.int32, gl.int32, gl.int32),
                is_pure=True,
                pack=4,
            )
        for h in gl.static_range(2):
            sums = _multiply_chunk(
                weights, slots[3], sums, (2 * c + h) * TOKEN_TILES, h, TOKEN_TILES, ELEMENT, L,
            )  # fmt: skip
            if _closes(64 * c + 32 * h + 32, GROUP_SIZE):
                new_sums, new_totals = (), ()
                for i in gl.static_range(len(sums)):
                    scale = lane_word(
                        slots[1], 64 * c + 32 * h, i // TOKEN_TILES, ROW_TILES, GROUP_SIZE, QUADS, L
                    )
                    total = gl.inline_asm_elementwise(
                        SCALE,
                        SCALE_CONSTRAINTS,
                        (scale, sums[i], totals[i]),
                        gl.float32,
                        is_pure=True,
                        pack=4,
                    )
                    new_totals = new_totals + (total,)
                    new_sums = new_sums + (gl.zeros_like(total),)
                sums, totals = new_sums, new_totals
    return sums, totals
