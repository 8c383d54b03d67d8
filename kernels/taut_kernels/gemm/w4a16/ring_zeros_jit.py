"""Where the packed zero points (:mod:`.layout`) of the copied rings lie.

A stage keeps whole quads of eight words, also where a warp's part of a step is less than a quad.
"""

# ruff: noqa: RUF005 (Triton's front end adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from taut_kernels.gemm.w4a16.quads_jit import zero_offsets, zero_quads
from taut_kernels.gemm.w4a16.ring_address_jit import first_tile
from taut_kernels.hopper.layouts import axis


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
