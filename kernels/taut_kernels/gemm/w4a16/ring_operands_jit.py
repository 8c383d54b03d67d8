"""Operands of the copied `wgmma` ring: activations, and what a step's weights are converted by.

See :mod:`.ring_kernel`.
"""

# ruff: noqa: RUF005 (Triton's front end adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from taut_kernels.gemm.w4a16.ring_stage_jit import lane_offsets, lane_word
from taut_kernels.hopper import axis, copy


@gluon.jit
def token_addresses(x_ptr, M, stride_xm, first_chunk, BLOCK_M: gl.constexpr, LX: gl.constexpr):
    """Return pointers to the first chunk's activations: words of two columns, fragment order."""
    token = gl.program_id(2) * BLOCK_M + axis(0, BLOCK_M, LX, 2)
    # Tokens beyond M read the first ones again: no mask, never stored. Not all the last one:
    # every multiprocessor would ask one place of L2 for one line.
    token = (token % M).to(gl.int64)
    word = axis(1, 32, LX, 2)
    # Positions count (h, i, j, t), columns (h, t, i, j).
    word = word // 16 * 16 + word % 4 * 4 + word // 8 % 2 * 2 + word // 4 % 2
    words_ptr = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    return words_ptr + (token * (stride_xm // 2) + (word + first_chunk * 32))


@gluon.jit
def copy_tokens(
    x_rings,  # a chunk of a step each
    slot,
    ptrs,  # of token_addresses
    step,
    first_chunk,
    CHUNKS: gl.constexpr,
    CHUNKS_PER_STEP: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Ask for a step's activations, one copy a chunk."""
    for c in gl.static_range(CHUNKS_PER_STEP):
        chunk = step * CHUNKS_PER_STEP + c
        if MASKED:
            copy(x_rings[c].index(slot), ptrs + chunk * 32, mask=first_chunk + chunk < CHUNKS)
        else:
            copy(x_rings[c].index(slot), ptrs + chunk * 32)


@gluon.jit
def slots(rings, slot, GROUP_SIZE: gl.constexpr):
    """Return one stage of weights, scales and zero points."""
    s_slot = slot if GROUP_SIZE else 0
    return rings[0].index(slot), rings[1].index(s_slot), rings[2].index(s_slot)


@gluon.jit
def _operand(
    stage,  # of slots
    place,  # of zero_places
    channels,  # as of load_operands
    part: gl.constexpr,  # 0: offsets, 1: scales
    COLUMN: gl.constexpr,
    ROW_TILE: gl.constexpr,
    ROW_TILES: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    QUADS: gl.constexpr,  # of whole_quads
    ELEMENT: gl.constexpr,
    L: gl.constexpr,
):
    """Return a lane's word for a column's group of a row tile."""
    if GROUP_SIZE == 0:
        word = channels[part][ROW_TILE]
    elif part == 0:
        word = lane_offsets(stage[2], place, COLUMN, ROW_TILE, ROW_TILES, GROUP_SIZE, ELEMENT, L)
    else:
        word = lane_word(stage[1], COLUMN, ROW_TILE, ROW_TILES, GROUP_SIZE, QUADS, L)
    return word


@gluon.jit
def load_operands(
    stage,  # of slots
    place,  # of zero_places
    channels,  # offsets and scale words, a row tile each, without GROUP_SIZE
    TILES: gl.constexpr,  # chunks of row tiles in a step
    ROW_TILES: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    QUADS: gl.constexpr,  # of whole_quads
    HAS_ZEROS: gl.constexpr,
    ELEMENT: gl.constexpr,
    L: gl.constexpr,
):
    """Return what converts each chunk of a row tile: words, offsets (if any) and scales.

    All at once, so that nothing waits for shared memory between two products.
    """
    every = ()
    for i in gl.static_range(TILES):
        operands = (stage[0].slice(i, 1, 0).load(L),)
        for part in gl.static_range(0 if HAS_ZEROS else 1, 2):
            for h in gl.static_range(2):
                word = _operand(
                    stage, place, channels, part, 64 * (i // ROW_TILES) + 32 * h, i % ROW_TILES,
                    ROW_TILES, GROUP_SIZE, QUADS, ELEMENT, L,
                )  # fmt: skip
                operands = operands + (word,)
        every = every + (operands,)
    return every
