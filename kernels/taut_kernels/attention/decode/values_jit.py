"""Jit functions of :mod:`.op`: 8-bit keys and values as fp16 operands.

A cache of 8-bit elements is read as 16-bit words of two neighbouring elements of a head. That is
what lets `ldmatrix`, which knows 16-bit elements only, hand the values to the tensor cores
transposed; the two halves of the words are two operands of half the width. Every e4m3 and int8
value is exact in fp16, so no scale is needed here.

:func:`halves` is written twice: as one inline assembly of 3 to 5 instructions for four elements,
and in Triton, bit for bit the same, for the interpreter and for cards without the conversion.

Source: PTX ISA 8.x, `cvt.rn.f16x2.e4m3x2` (sm_89), `prmt`; the int8 conversion by a magic exponent
(1024 + 128 + x as bits 0x64xx) is that of FasterTransformer's mixed GEMM, arXiv:2211.10017 §3.3.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

# Each word pair (a, b) has bytes a0 a1 b0 b1; the results are (a0, b0) and (a1, b1) as fp16.
E4M3_PTX = tl.constexpr(
    """
    {
    .reg .b32 sorted;
    .reg .b16 low, high;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }
    """
)
INT8_PTX = tl.constexpr(
    """
    {
    .reg .b32 biased, magic, offset;
    mov.b32 magic, 0x64646464;
    mov.b32 offset, 0x64806480;
    xor.b32 biased, $2, 0x80808080;
    prmt.b32 $0, biased, magic, 0x4240;
    prmt.b32 $1, biased, magic, 0x4341;
    sub.f16x2 $0, $0, offset;
    sub.f16x2 $1, $1, offset;
    }
    """
)
_CONSTRAINTS = tl.constexpr("=&r,=&r,r")


@triton.jit
def _e4m3(byte):
    """Return the fp16 value of an e4m3 code in the low bits of an int16; NaN is 480."""
    # Exponents differ by a bias of 15 - 7 = 8: the factor makes up for it, subnormal codes too.
    bits = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _int8(byte):
    """Return the fp16 value of an int8 in the low bits of an int16."""
    return ((byte ^ 0x80) | 0x6400).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def halves(words, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """Return first and second elements, fp16, of int16 ``words`` that hold two each.

    FORMAT is "fp8" (e4m3) or "int8"; ASM uses inline assembly, which needs sm_89 for "fp8".
    """
    if ASM:
        PTX: tl.constexpr = E4M3_PTX if FORMAT == "fp8" else INT8_PTX
        even, odd = tl.inline_asm_elementwise(
            PTX,
            _CONSTRAINTS,
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif FORMAT == "fp8":
        even = _e4m3(words & 0xFF)
        odd = _e4m3((words >> 8) & 0xFF)
    else:
        even = _int8(words & 0xFF)
        odd = _int8((words >> 8) & 0xFF)
    return even, odd
