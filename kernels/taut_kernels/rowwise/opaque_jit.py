"""A jit function that keeps the compiler from holding 32 bits where 16 will do."""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def opaque(x, OPAQUE: tl.constexpr):
    """Return ``x``, of a 16-bit type, as a value that the compiler knows nothing about.

    Two loops over the same tuple of loads convert each of them to fp32. The compiler sees that the
    conversions are the same and keeps their results from the first loop for the second: twice the
    registers of what was loaded. Without OPAQUE (in the interpreter, for fp32) nothing happens.
    """
    if OPAQUE:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
        )
    return x
