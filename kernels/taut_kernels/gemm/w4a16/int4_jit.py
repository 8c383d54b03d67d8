"""4-bit weights become 16-bit floats: words, scales and zero points as operand A of `wgmma`.

A text of PTX is for one lane and runs through `inline_asm_elementwise(pack=4)`. A product takes 16,
32 or 64 K indices: one, two or all four of a lane's words of a chunk, so that converting the next
part goes on while the last product runs. Four groups of 16 rows are a quad (:mod:`.layout`): 32
words of scales and eight of zero points.

Source: the conversion (an int4 in the low bits of a float whose exponent makes one unit 1) is the
one of "Who Says Elephants Can't Run", arXiv:2211.10017, §3.3.
"""

# ruff: noqa: RUF005 (Triton's front end adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from taut_kernels.gemm.w4a16 import ring_tile
from taut_kernels.hopper import axis

MAGIC = {"bf16": 0x43004300, "f16": 0x64006400}
"""Two floats 128 (bf16) or 1024 (fp16), whose last mantissa bit is worth 1: ``magic | q`` is
``magic + q``."""
ONE = {"bf16": 0x3F803F80, "f16": 0x3C003C00}
MINUS_MIDDLE = {"bf16": 0xC308C308, "f16": 0xE408E408}
"""Two floats -(magic + 8): what a symmetric scheme adds to ``magic + q`` to get ``q - 8``."""
MINUS_MAGIC = {"bf16": 0xC300C300, "f16": 0xE400E400}
"""Two floats -magic: ``minus magic | zero`` is ``-(magic + zero)``."""
NEGATIVE_ZERO = 0x80008000

whole_quads = gluon.constexpr_function(ring_tile.whole_quads)
scale_lines = gluon.constexpr_function(ring_tile.scale_lines)
zero_quads = gluon.constexpr_function(ring_tile.zero_quads)


@gluon.constexpr_function
def shifted(operand: int, nibbles: int) -> list[str]:
    """Write what brings a word, some nibbles lower, into the register ``shifted``."""
    if nibbles == 0:
        return [f"mov.b32 shifted, ${operand};"]
    return [f"shr.u32 shifted, ${operand}, {4 * nibbles};"]


@gluon.constexpr_function
def scaled_pair(element: str, row: int, result: str) -> list[str]:
    """Write ``result = (value + offset) * scale`` of the two nibbles that ``shifted`` holds.

    Args:
        element: ``bf16`` or ``f16``.
        row: which registers ``offset`` and ``scale`` it takes, 0 or 1.
        result: register, holds two numbers.
    """
    return [
        # 0xEA is (source & mask) | magic.
        f"lop3.b32 value, shifted, 0x000f000f, {MAGIC[element]:#x}, 0xEA;",
        f"fma.rn.{element}x2 value, value, one, offset{row};",
        # Adding -0 keeps the product as it is; sm_80 has no mul.bf16x2.
        f"fma.rn.{element}x2 {result}, value, scale{row}, nothing;",
    ]


@gluon.constexpr_function
def both_rows(name: str, pair: str) -> list[str]:
    """Write what brings each half of a register twice into a register of its own."""
    return [f"prmt.b32 {name}0, {pair}, 0, 0x1010;", f"prmt.b32 {name}1, {pair}, 0, 0x3232;"]


@gluon.constexpr_function
def unpack_zeros(element: str) -> list[str]:
    """Write what turns the lowest zero points of the register ``shifted`` into ``offset0`` and 1.

    They are those of rows g and g + 8 (:mod:`.layout`); each is needed twice in
    one register.
    """
    # 0xEA is (source & mask) | magic.
    pair = f"lop3.b32 shifted, shifted, 0x000f000f, {MINUS_MAGIC[element]:#x}, 0xEA;"
    return [pair, *both_rows("offset", "shifted")]


@gluon.constexpr_function
def part_ptx(element: str, has_zeros: bool, part: int, parts: int) -> str:
    """Write the PTX of ``(q - zero) * scale`` for some of a lane's four words.

    Operands: four results a word; four words; then, with zero points, four copies of the offsets
    -(magic + zero) of each half of the 64 columns the part is of; then likewise the scale words.
    Such a word holds what rows g (low half) and g + 8 (high half) need.

    Args:
        element: ``bf16`` or ``f16``.
        has_zeros: with zero points; otherwise 8 is subtracted.
        part: which of the parts, 0..parts-1.
        parts: 1, 2 or 4, of as many words each.

    Returns:
        The text.
    """
    count = 4 // parts
    halves = 2 if parts == 1 else 1
    first_word = 4 * count
    zeros, scales = first_word + 4, first_word + 4 + (4 * halves if has_zeros else 0)
    text = ["{", ".reg .b32 shifted, value, one, nothing, offset0, offset1, scale0, scale1;"]
    text += [f"mov.b32 one, {ONE[element]:#x};", f"mov.b32 nothing, {NEGATIVE_ZERO:#x};"]
    if not has_zeros:
        text += [f"mov.b32 offset{row}, {MINUS_MIDDLE[element]:#x};" for row in (0, 1)]
    for step in range(count):
        if step % 2 == 0:
            text += both_rows("offset", f"${zeros + 2 * step}") if has_zeros else []
            text += both_rows("scale", f"${scales + 2 * step}")
        place = part * count + step
        for register in range(4):
            word = first_word + place % 2 * 2 + register // 2
            text += shifted(word, place // 2 * 2 + register % 2)
            text += scaled_pair(element, register % 2, f"${4 * step + register}")
    return "\n".join([*text, "}"])


@gluon.constexpr_function
def part_constraints(has_zeros: bool, parts: int) -> str:
    """Write the constraints of :func:`part_ptx`; outputs are written before inputs end."""
    halves = 2 if parts == 1 else 1
    return ",".join(["=&r"] * (16 // parts) + ["r"] * (4 + 4 * halves * (2 if has_zeros else 1)))


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


@gluon.constexpr_function
def groups_of(chunks, group_size):
    """Count the groups of a step; one that is shorter than a group has its scale all the same."""
    return max(1, chunks * 64 // group_size) if group_size else 1


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
