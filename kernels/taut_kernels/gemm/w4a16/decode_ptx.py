"""PTX of the decode kernel: int4 → 16-bit float, `mma.sync`, group scale.

Every text is for one lane and runs through `tl.inline_asm_elementwise(pack=4)`: four neighbouring
elements of a 1-D tensor are four registers of one lane. `mma.m16n8k16` multiplies a 16×16 tile of
weights (A, four registers of two values) with 16×8 activations (B, two registers), tokens in the
columns; a lane's accumulator is rows ``lane // 4`` and ``lane // 4 + 8``, two columns each.

Source: PTX ISA 8.x, "Matrix fragments for mma.m16n8k16"; the conversion is that of
:mod:`.int4_jit`.
"""

from __future__ import annotations

import triton

from taut_kernels.gemm.w4a16.int4_jit import MAGIC, MINUS_MIDDLE, ONE, shifted, unpack_zeros


@triton.constexpr_function  # type: ignore[untyped-decorator]
def multiply_ptx(
    element: str, half: int, token_tiles: int, zero_index: int, has_zeros: bool
) -> str:
    """Write the PTX that adds 32 K indices of one 16-row tile to its accumulators.

    Operands: four accumulators a token tile (out), four weight words, four activation words a token
    tile, four copies of a quad's zero points (if any), then the accumulators (in).

    Args:
        element: ``bf16`` or ``f16``.
        half: which half of the 64 K indices of the weight words, 0 or 1.
        token_tiles: tiles of 8 tokens, 1 or 2.
        zero_index: which of the quad's groups this is, 0..3.
        has_zeros: with zero points; otherwise 8 is subtracted.

    Returns:
        The text.
    """
    outputs = 4 * token_tiles
    words, zeros = outputs, outputs + 4 + 4 * token_tiles
    accumulators = zeros + (4 if has_zeros else 0)
    text = ["{", ".reg .b32 a0, a1, a2, a3, shifted, one, offset0, offset1;"]
    text += [f"mov.f32 ${i}, ${accumulators + i};" for i in range(outputs)]
    text += [f"mov.b32 one, {ONE[element]:#x};"]
    if has_zeros:
        text += shifted(zeros, zero_index) + unpack_zeros(element)
    else:
        text += [f"mov.b32 offset{row}, {MINUS_MIDDLE[element]:#x};" for row in (0, 1)]
    for step in (0, 1):
        for register in range(4):
            text += shifted(words + 2 * step + register // 2, 2 * half + register % 2)
            # 0xEA is (source & mask) | magic.
            text += [f"lop3.b32 a{register}, shifted, 0x000f000f, {MAGIC[element]:#x}, 0xEA;"]
            offset = f"offset{register % 2}"
            text += [f"fma.rn.{element}x2 a{register}, a{register}, one, {offset};"]
        for tile in range(token_tiles):
            b = words + 4 + 4 * tile + 2 * step
            d = ", ".join(f"${4 * tile + i}" for i in range(4))
            text += [
                f"mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32 "
                f"{{{d}}}, {{a0, a1, a2, a3}}, {{${b}, ${b + 1}}}, {{{d}}};"
            ]
    return "\n".join([*text, "}"])


@triton.constexpr_function  # type: ignore[untyped-decorator]
def multiply_constraints(token_tiles: int, has_zeros: bool) -> str:
    """Write the constraints of :func:`multiply_ptx`; outputs are written before inputs are read."""
    outputs = 4 * token_tiles
    inputs = 4 + 4 * token_tiles + (4 if has_zeros else 0)
    return ",".join(["=&f"] * outputs + ["r"] * inputs + ["f"] * outputs)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def scale_ptx(element: str, index: int) -> str:
    """Write the PTX of ``total + scale * group_sum`` for one lane's four accumulators, in fp32.

    Operands: four results, four scale words, four group sums, four totals. Scale word ``index``
    holds the scales of rows g (low half) and g + 8 (high half).

    Args:
        element: ``bf16`` or ``f16``.
        index: which of the four scale words, 0..3.

    Returns:
        The text.
    """
    if element == "bf16":
        convert = [
            f"shl.b32 bits, ${4 + index}, 16;",
            "mov.b32 low, bits;",
            f"and.b32 bits, ${4 + index}, 0xffff0000;",
            "mov.b32 high, bits;",
        ]
    else:
        convert = [
            f"mov.b32 {{h0, h1}}, ${4 + index};",
            "cvt.f32.f16 low, h0;",
            "cvt.f32.f16 high, h1;",
        ]
    products = [
        f"fma.rn.f32 ${i}, ${8 + i}, {'low' if i < 2 else 'high'}, ${12 + i};" for i in range(4)
    ]
    declare = [".reg .b32 bits;", ".reg .b16 h0, h1;", ".reg .f32 low, high;"]
    return "\n".join(["{", *declare, *convert, *products, "}"])


SCALE_CONSTRAINTS = triton.language.constexpr(",".join(["=&f"] * 4 + ["r"] * 4 + ["f"] * 8))

FENCE_PTX = triton.language.constexpr(
    "{ bar.warp.sync 0xffffffff; mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7; }"
)
"""Keeps ptxas from sinking the loads issued above it to their uses below."""
FENCE_CONSTRAINTS = triton.language.constexpr("=r,=r,=r,=r,r,r,r,r")
