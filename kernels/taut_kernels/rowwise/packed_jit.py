"""Jit functions that get the same bits with fewer instructions than the compiler makes of them.

Two 16-bit values a lane: a product of two bf16 or fp16 values is exact in fp32, so that rounding it
once to their type gives what a packed product gives (bf16: but for results below 2**-126).
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter has no assembly; it takes the same values by way of fp32.
_ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def _of_pairs(CODE: tl.constexpr, x, y):
    return tl.inline_asm_elementwise(CODE, "=r,r,r", [x, y], dtype=x.dtype, is_pure=True, pack=2)


@triton.jit
def product(x, y):
    """Return x · y, of the type that both have, rounded once; they broadcast against each other."""
    if _ASSEMBLY and x.dtype == tl.bfloat16:
        # −0 added: sm_80 has no packed product of bf16 without a sum.
        z = _of_pairs("{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }", x, y)
    elif _ASSEMBLY and x.dtype == tl.float16:
        z = _of_pairs("mul.rn.f16x2 $0, $1, $2;", x, y)
    else:
        z = (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype)
    return z


@triton.jit
def wide(x):
    """Return ``x`` as fp32."""
    if _ASSEMBLY and x.dtype == tl.bfloat16:
        # One instruction a value; the compiler takes a half out of its register first.
        y = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def exp_or_zero(x):
    """Return exp(x) of fp32, 0 in the place of what is below 2**-126.

    ``tl.exp`` finds out first whether the result is that small: three instructions of five.
    """
    if _ASSEMBLY:
        y = tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, t; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        y = tl.exp(x)
    return y


@triton.jit
def larger_magnitude(largest, x):
    """Return max(largest, abs(x)), of the type that both have; a NaN loses."""
    if _ASSEMBLY and x.dtype == tl.bfloat16:
        z = _of_pairs("{ .reg .b32 a; abs.bf16x2 a, $2; max.bf16x2 $0, $1, a; }", largest, x)
    elif _ASSEMBLY and x.dtype == tl.float16:
        z = _of_pairs("{ .reg .b32 a; abs.f16x2 a, $2; max.f16x2 $0, $1, a; }", largest, x)
    else:
        z = tl.maximum(largest, tl.abs(x))
    return z
