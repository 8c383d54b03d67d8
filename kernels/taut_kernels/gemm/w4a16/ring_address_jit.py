"""Where the operands of the rings filled by `cp.async` lie: pointers of the first step.

See :mod:`.decode_ring_kernel`. Of zero points a stage keeps whole quads of eight words, also where
a warp's part of a step is less than a quad (:mod:`.layout`).
"""

# ruff: noqa: RUF005 (Triton's front end adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from taut_kernels.gemm.w4a16.int4_jit import zero_offsets, zero_quads
from taut_kernels.hopper import axis


@gluon.jit
def first_tile(
    N, LAYOUT: gl.constexpr, ROW_TILES: gl.constexpr, ROW_WARPS: gl.constexpr, RANK: gl.constexpr
):
    """Return each row warp's first 16-row tile, along axis 2 of a layout.

    A program's spare row tiles repeat the last one: two warps then store equal values.
    """
    tile = (gl.program_id(0) * ROW_WARPS + axis(2, ROW_WARPS, LAYOUT, RANK)) * ROW_TILES
    return gl.minimum(tile, N // 16 - ROW_TILES)


@gluon.jit
def word_addresses(
    qweight_ptr, N, first_chunk, CHUNKS: gl.constexpr, CHUNKS_PER_STEP: gl.constexpr,
    ROW_TILES: gl.constexpr, ROW_WARPS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Return pointers to the first step's weights, and which chunk each is of."""
    copied = axis(0, CHUNKS_PER_STEP * ROW_TILES, L, 5)
    tile = copied % ROW_TILES + first_tile(N, L, ROW_TILES, ROW_WARPS, 5)
    chunk = copied // ROW_TILES + first_chunk
    lane_word = axis(3, 32, L, 5) * 4 + axis(4, 4, L, 5)
    return qweight_ptr + ((tile * CHUNKS + chunk) * 128 + lane_word), chunk


@gluon.jit
def scale_addresses(
    scales_ptr,
    N,
    first_group,
    ALL_QUADS: gl.constexpr,
    WARP_LINES: gl.constexpr,  # of scale_lines
    QUADS: gl.constexpr,  # of whole_quads: a line is a quad's, not a group's
    ROW_TILES: gl.constexpr,
    ROW_WARPS: gl.constexpr,
    LS: gl.constexpr,
):
    """Return pointers to each lane's word of a quad, and the first step's quads or groups."""
    copied = axis(0, WARP_LINES * ROW_TILES, LS, 4)
    tile = copied % ROW_TILES + first_tile(N, LS, ROW_TILES, ROW_WARPS, 4)
    first = first_group // 4 if QUADS else first_group
    line = copied // ROW_TILES + first
    lane = axis(3, 32, LS, 4)
    quads = tile * (ALL_QUADS * 32) + (lane if QUADS else lane // 4 * 4)
    return scales_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + quads, line


@gluon.jit
def activation_addresses(
    x_ptr, M, stride_xm, first_chunk, CHUNKS_PER_STEP: gl.constexpr, TOKEN_TILES: gl.constexpr,
    LX: gl.constexpr,
):  # fmt: skip
    """Return pointers to the first step's activations, and which chunk each is of.

    Fragments lie as (chunk, half, token tile). Columns beyond M read the last
    token again: no mask, never stored.
    """
    fragment = axis(0, CHUNKS_PER_STEP * 2 * TOKEN_TILES, LX, 3)
    lane = axis(1, 32, LX, 3)
    token = fragment % TOKEN_TILES * 8 + lane // 4
    token = gl.minimum(token, M - 1).to(gl.int64)
    half = (fragment // TOKEN_TILES) % 2
    chunk = fragment // (2 * TOKEN_TILES)
    chunk += first_chunk
    word = chunk * 32 + half * 16 + (lane % 4) * 4 + axis(2, 4, LX, 3)
    words_ptr = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    return words_ptr + (token * (stride_xm // 2) + word), chunk


@gluon.jit
def channel_words(words_ptr, N, ROW_TILES: gl.constexpr, ROW_WARPS: gl.constexpr, L: gl.constexpr):
    """Load each row tile's scale words where a channel is one group."""
    ptrs = words_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    ptrs += first_tile(N, L, ROW_TILES, ROW_WARPS, 5) * 32 + (axis(3, 32, L, 5) // 4) * 4
    words = ()
    for r in gl.static_range(ROW_TILES):
        words = words + (gl.load(ptrs + r * 32),)
    return words


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
