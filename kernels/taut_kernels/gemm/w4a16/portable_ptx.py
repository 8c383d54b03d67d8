"""PTX that turns a lane's 32 packed weights into scaled bf16 or fp16, in the order `wgmma` reads.

One text serves four neighbouring elements of a 1-D int32 tensor, that is the four words a lane
holds of one 16-row × 64-column chunk (:mod:`.layout`), through
`tl.inline_asm_elementwise(pack=4)`. Its eight outputs are 16-bit tensors of four elements a lane:
output 2s + r holds the values of rows ``lane // 4 + 8r`` for MMA step s, elements (j, b). Joined
and permuted in Triton they are operand A of `wgmma.m64nNk16` without moving a register.

Source: PTX ISA 8.x, "Register fragments for wgmma.mma_async.m64nNk16"; the conversion is that of
:mod:`.decode_ptx`.
"""

from __future__ import annotations

import triton

from taut_kernels.gemm.w4a16.int4_jit import (
    MINUS_MIDDLE,
    NEGATIVE_ZERO,
    ONE,
    both_rows,
    scaled_pair,
    shifted,
    unpack_zeros,
)

_OUTPUTS = 16


@triton.constexpr_function  # type: ignore[untyped-decorator]
def convert_ptx(element: str, has_zeros: bool, same_group: bool) -> str:
    """Write the PTX of ``(q - zero) * scale`` for one lane's four words.

    Operands: sixteen results (two a tensor), four words, the four scale words of a quad, four
    copies of its zero points (if any), then four of the index of this chunk's group in the quad.

    Args:
        element: ``bf16`` or ``f16``.
        has_zeros: with zero points; otherwise 8 is subtracted.
        same_group: both halves of the 64 columns share a group; otherwise (groups of 32) the
            second half's is the next one.

    Returns:
        The text.
    """
    words, scales, zeros = _OUTPUTS, _OUTPUTS + 4, _OUTPUTS + 8
    index = zeros + (4 if has_zeros else 0)
    text = ["{", ".reg .b32 shifted, one, nothing, value, low, high, pair, bit;"]
    text += [".reg .b32 scale0, scale1, offset0, offset1;", ".reg .pred odd, upper;"]
    text += [f"mov.b32 one, {ONE[element]:#x};", f"mov.b32 nothing, {NEGATIVE_ZERO:#x};"]
    if not has_zeros:
        text += [f"mov.b32 offset{row}, {MINUS_MIDDLE[element]:#x};" for row in (0, 1)]
    for half in (0, 1):
        if half == 0 or not same_group:
            text += _pick_scale(half, index, scales)
            text += _pick_zeros(half, index, zeros, element) if has_zeros else []
        for step in (2 * half, 2 * half + 1):
            for register in range(4):
                j, row = register // 2, register % 2
                text += shifted(words + step % 2 * 2 + j, 2 * half + row)
                result = f"${(2 * step + row) * 2 + j}"
                text += scaled_pair(element, row, result)
    return "\n".join([*text, "}"])


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _pick_scale(half: int, index: int, scales: int) -> list[str]:
    """Write the choice of a group's pair of scales out of a quad, each twice a register."""
    text = [f"and.b32 bit, ${index}, 1;"]
    if half:
        # Groups of 32: the first half's group has an even index, so the next one only flips a bit.
        text += ["xor.b32 bit, bit, 1;"]
    text += ["setp.ne.u32 odd, bit, 0;", f"and.b32 bit, ${index}, 2;", "setp.ne.u32 upper, bit, 0;"]
    text += [
        f"selp.b32 low, ${scales + 1}, ${scales}, odd;",
        f"selp.b32 high, ${scales + 3}, ${scales + 2}, odd;",
        "selp.b32 pair, high, low, upper;",
    ]
    return [*text, *both_rows("scale", "pair")]


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _pick_zeros(half: int, index: int, zeros: int, element: str) -> list[str]:
    """Write likewise the choice of its offsets -(magic + zero)."""
    text = [f"shl.b32 bit, ${index}, 2;"]
    if half:
        text += ["add.u32 bit, bit, 4;"]
    return [*text, f"shr.u32 shifted, ${zeros}, bit;", *unpack_zeros(element)]


@triton.constexpr_function  # type: ignore[untyped-decorator]
def convert_constraints(has_zeros: bool) -> str:
    """Write the constraints of :func:`convert_ptx`; outputs are written before inputs are read."""
    return ",".join(["=&r"] * _OUTPUTS + ["r"] * (16 if has_zeros else 12))


WAIT_PTX = triton.language.constexpr("wgmma.wait_group.sync.aligned 0;")
"""Waits until no `wgmma` of this warp group reads registers any more; passes four words through."""
WAIT_CONSTRAINTS = triton.language.constexpr("=r,=r,=r,=r,0,1,2,3")
