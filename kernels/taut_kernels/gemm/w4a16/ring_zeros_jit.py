"""Packed zero points (:mod:`.layout`) in the ring kernels: where, and unpacked.

A stage keeps whole quads of eight words, also where a warp's part of a step is less than a quad.
"""

# ruff: noqa: RUF005 (Triton's front end adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from taut_kernels.gemm.w4a16 import decode_ring_tile as tiles_decode_ring
from taut_kernels.gemm.w4a16.decode_ptx import MINUS_MAGIC
from taut_kernels.gemm.w4a16.ring_address_jit import first_tile
from taut_kernels.hopper.layouts import axis

zero_quads = gluon.constexpr_function(tiles_decode_ring.zero_quads)


@gluon.jit
def zero_addresses(
    zeros_ptr, N, first_chunk, ALL_QUADS: gl.constexpr, CHUNKS_PER_STEP: gl.constexpr,
    GROUP_SIZE: gl.constexpr, ROW_TILES: gl.constexpr, ROW_WARPS: gl.constexpr,
):  # fmt: skip
    """Return pointers to the first quads of each row tile, and what tells which they are in a step.

    That is the first chunk of the first step, and the quad of its part that is
    copied. All of a warp's, quads × row tiles along axis 0, are one copy, 16 bytes a lane.
    """
    QUADS: gl.constexpr = zero_quads(CHUNKS_PER_STEP, GROUP_SIZE)
    LZ: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 4], [16, 1, 1, 2], [1, 1, ROW_WARPS, 1], [3, 2, 1, 0]
    )
    copied = axis(0, QUADS * ROW_TILES, LZ, 4)
    tile = copied % ROW_TILES + first_tile(N, LZ, ROW_TILES, ROW_WARPS, 4)
    words = (tile * ALL_QUADS + copied // ROW_TILES) * 8 + axis(3, 8, LZ, 4)
    chunk = first_chunk
    return zeros_ptr + words, chunk, copied // ROW_TILES


@gluon.jit
def zero_places(
    first_chunk,
    step,
    CHUNKS_PER_STEP: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    QUADS: gl.constexpr,  # of whole_quads
    L: gl.constexpr,
):
    """Return the place in its quad of the first group of a step."""
    place = 0
    if GROUP_SIZE and not QUADS:
        chunk = first_chunk + step * CHUNKS_PER_STEP
        place = chunk * 64 // GROUP_SIZE % 4
    return place


@gluon.constexpr_function
def _minus_magic(element):
    """Return the two floats -magic as a signed word."""
    return MINUS_MAGIC[element] - 2**32


@gluon.jit
def zero_offsets(words, place, ELEMENT: gl.constexpr):
    """Return the offsets -(magic + zero) of rows g and g + 8 for one group of packed quads."""
    MINUS: gl.constexpr = _minus_magic(ELEMENT)
    return ((words >> (4 * place)) & 0x000F000F) | MINUS


@gluon.jit
def channel_offsets(
    zeros_ptr,
    N,
    ROW_TILES: gl.constexpr,
    ROW_WARPS: gl.constexpr,
    ELEMENT: gl.constexpr,
    L: gl.constexpr,
):
    """Load each row tile's offsets where a channel is one group."""
    ptrs = zeros_ptr + (first_tile(N, L, ROW_TILES, ROW_WARPS, 5) * 8 + axis(3, 32, L, 5) // 4)
    offsets = ()
    for r in gl.static_range(ROW_TILES):
        offsets = offsets + (zero_offsets(gl.load(ptrs + r * 8), 0, ELEMENT),)
    return offsets
