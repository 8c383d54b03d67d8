"""What the kernel fed by TMA converts: words of a step, scales and zero points of its groups.

See :mod:`.tma_kernel`.
"""

# ruff: noqa: RUF005 (Triton's front end adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from taut_kernels.gemm.w4a16.quads_jit import zero_offsets, zero_quads
from taut_kernels.hopper.layouts import axis


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


@gluon.constexpr_function
def groups_of(chunks, group_size):
    """Count the groups of a step; one that is shorter than a group has its scale all the same."""
    return max(1, chunks * 64 // group_size) if group_size else 1


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
def scale_ptrs_of(
    words_ptr, first_tile, WORDS: gl.constexpr, ALL_QUADS: gl.constexpr, ROW_TILES: gl.constexpr,
    WARPS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Return pointers to the first scale (or zero point) word of each lane's rows.

    Of a quad two rows have WORDS of them: four of scales, one of zero points.
    """
    tile = first_tile + axis(2, WARPS, L, 5) * ROW_TILES
    place = (tile * (ALL_QUADS * 8) + axis(3, 32, L, 5) // 4) * WORDS
    return words_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + place


@gluon.constexpr_function
def _power(count):
    """Return the least power of two that is no less."""
    return 1 << (count - 1).bit_length()


@gluon.jit
def prefetch(
    words_ptr,
    first_tile,
    first_chunk,
    WORDS: gl.constexpr,  # as of scale_ptrs_of
    CHUNKS: gl.constexpr,  # of the program
    K: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    TILES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Bring all scales (or zero points) of a program into L2, a line of 128 bytes a thread.

    A register can be loaded one step ahead only: it is moved on in the next one.
    """
    OF_TILE: gl.constexpr = (K // GROUP_SIZE + 3) // 4 * (8 * WORDS)
    # Up to the last quad's first word, from anywhere in a quad and in a line.
    APART: gl.constexpr = (CHUNKS * 64 // GROUP_SIZE // 4 + 1) * (8 * WORDS)
    LINES: gl.constexpr = _power((APART + 31) // 32 + 1)
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    line = gl.arange(0, TILES * LINES, L)
    word = first_chunk * 64 // GROUP_SIZE // 4 * (8 * WORDS) + line % LINES * 32
    place = (first_tile + line // LINES) * OF_TILE + gl.minimum(word, OF_TILE - 1)
    ptrs = words_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + place
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        (ptrs.to(gl.int64),),
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_scales(
    ptrs, first_chunk, GROUPS: gl.constexpr, GROUP_SIZE: gl.constexpr, K: gl.constexpr,
    ROW_TILES: gl.constexpr,
):  # fmt: skip
    """Ask for a step's scales: of GROUPS groups and every row tile, at :func:`scale_ptrs_of`."""
    ALL_QUADS: gl.constexpr = (K // GROUP_SIZE + 3) // 4 if GROUP_SIZE else 1
    found = ()
    for k in gl.static_range(GROUPS):
        place = 0
        if GROUP_SIZE:
            # A group beyond K meets activations that are 0; any finite scale will do.
            group = gl.minimum(first_chunk * 64 // GROUP_SIZE + k, K // GROUP_SIZE - 1)
            place = group // 4 * 32 + group % 4
        for r in gl.static_range(ROW_TILES):
            found = found + (gl.load(ptrs + (place + r * (ALL_QUADS * 32))),)
    return found


@gluon.jit
def load_zeros(
    ptrs, first_chunk, CHUNKS: gl.constexpr, GROUP_SIZE: gl.constexpr, K: gl.constexpr,
    ROW_TILES: gl.constexpr,
):  # fmt: skip
    """Ask for the zero points of a step of CHUNKS chunks: of every quad and row tile."""
    ALL_QUADS: gl.constexpr = (K // GROUP_SIZE + 3) // 4 if GROUP_SIZE else 1
    found = ()
    for q in gl.static_range(zero_quads(CHUNKS, GROUP_SIZE)):
        quad = 0
        if GROUP_SIZE:
            quad = gl.minimum(first_chunk * 64 // GROUP_SIZE // 4 + q, ALL_QUADS - 1)
        for r in gl.static_range(ROW_TILES):
            found = found + (gl.load(ptrs + (quad + r * ALL_QUADS) * 8),)
    return found


@gluon.constexpr_function
def _group(column, group_size):
    """Say which of a step's groups a column of it is of."""
    return column // group_size if group_size else 0


@gluon.jit
def operands_of(
    words,  # of one chunk of one row tile
    zeros,  # of load_zeros
    scales,  # of load_scales
    place,  # of zero_places
    CHUNK: gl.constexpr,
    R: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    ELEMENT: gl.constexpr,
    ROW_TILES: gl.constexpr,
):
    """Return what `convert` takes: words, then offsets (if any) and scales, by half."""
    result = (words,)
    if HAS_ZEROS:
        for h in gl.static_range(2):
            packed = zeros[_group(64 * CHUNK + 32 * h, GROUP_SIZE) // 4 * ROW_TILES + R]
            of_quad = place + _group(64 * CHUNK + 32 * h, GROUP_SIZE) % 4
            result = result + (zero_offsets(packed, of_quad, ELEMENT),)
    for h in gl.static_range(2):
        result = result + (scales[_group(64 * CHUNK + 32 * h, GROUP_SIZE) * ROW_TILES + R],)
    return result
