"""PTX of the `wgmma` ring kernel: a part of a lane's words → operand A of one product.

A product takes 16, 32 or 64 K indices: one, two or all four of a lane's words of a chunk, so that
converting the next part goes on while the last product runs. Fragments, conversion and source are
those of :mod:`.decode_ptx`.
"""

from __future__ import annotations

import triton

from taut_kernels.gemm.w4a16.decode_ptx import MINUS_MIDDLE, ONE, both_rows, scaled_pair, shifted

_NEGATIVE_ZERO = 0x80008000


@triton.constexpr_function  # type: ignore[untyped-decorator]
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
    text += [f"mov.b32 one, {ONE[element]:#x};", f"mov.b32 nothing, {_NEGATIVE_ZERO:#x};"]
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


@triton.constexpr_function  # type: ignore[untyped-decorator]
def part_constraints(has_zeros: bool, parts: int) -> str:
    """Write the constraints of :func:`part_ptx`; outputs are written before inputs end."""
    halves = 2 if parts == 1 else 1
    return ",".join(["=&r"] * (16 // parts) + ["r"] * (4 + 4 * halves * (2 if has_zeros else 1)))
