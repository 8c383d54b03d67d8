"""PTX of the ring kernel: int4 → 16-bit float apart from `mma.sync`, for any number of token tiles.

The decode kernel's texts (:mod:`.decode_ptx`) convert and multiply in one
piece, which names every accumulator; with 4 or 8 token tiles that is too many operands. Here one
text converts a lane's four words to the sixteen registers of operand A, and another multiplies two
of the four MMA steps with one token tile. Fragments, conversion and source are those of that file.
"""

from __future__ import annotations

import triton

from taut_kernels.gemm.w4a16.int4_jit import MAGIC, MINUS_MIDDLE, ONE, both_rows, shifted

_OUTPUTS = 16


@triton.constexpr_function  # type: ignore[untyped-decorator]
def ring_convert_ptx(element: str, has_zeros: bool) -> str:
    """Write the PTX of ``q - zero`` for one lane's four words.

    Operands: sixteen results, four an MMA step; four words; then, with zero points, four copies of
    the offsets -(magic + zero) of each half of the 64 columns. Such a word holds what rows g (low
    half) and g + 8 (high half) need.

    Args:
        element: ``bf16`` or ``f16``.
        has_zeros: with zero points; otherwise 8 is subtracted.

    Returns:
        The text.
    """
    text = ["{", ".reg .b32 shifted, value, one, offset0, offset1;"]
    text += [f"mov.b32 one, {ONE[element]:#x};"]
    zeros = _OUTPUTS + 4
    if not has_zeros:
        text += [f"mov.b32 offset{row}, {MINUS_MIDDLE[element]:#x};" for row in (0, 1)]
    for step in range(4):
        if step % 2 == 0:
            text += both_rows("offset", f"${zeros + 2 * step}") if has_zeros else []
        for register in range(4):
            result, row = f"${4 * step + register}", register % 2
            word = _OUTPUTS + step % 2 * 2 + register // 2
            text += shifted(word, step // 2 * 2 + row)
            # 0xEA is (source & mask) | magic.
            text += [f"lop3.b32 value, shifted, 0x000f000f, {MAGIC[element]:#x}, 0xEA;"]
            text += [f"fma.rn.{element}x2 {result}, value, one, offset{row};"]
    return "\n".join([*text, "}"])


@triton.constexpr_function  # type: ignore[untyped-decorator]
def ring_convert_constraints(has_zeros: bool) -> str:
    """Write the constraints of :func:`ring_convert_ptx`; outputs are written before inputs end."""
    return ",".join(["=&r"] * _OUTPUTS + ["r"] * (4 + 8 * has_zeros))


@triton.constexpr_function  # type: ignore[untyped-decorator]
def ring_multiply_ptx(element: str) -> str:
    """Write the PTX that multiplies two MMA steps of a row tile with one token tile.

    Operands: four accumulators (out), the steps' four registers of operand A each, four words of
    activations (two a step), the accumulators (in, tied to the outputs).

    Args:
        element: ``bf16`` or ``f16``.

    Returns:
        The text.
    """
    kind = f"mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32"
    return "\n".join(
        f"{kind} {{$0, $1, $2, $3}}, {{{a}}}, {{${b}, ${b + 1}}}, {{$0, $1, $2, $3}};"
        for a, b in (("$4, $5, $6, $7", 12), ("$8, $9, $10, $11", 14))
    )


RING_MULTIPLY_CONSTRAINTS = triton.language.constexpr(
    ",".join(["=&f"] * 4 + ["r"] * 12 + ["0", "1", "2", "3"])
)
