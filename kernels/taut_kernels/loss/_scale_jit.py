"""Jit function that multiplies a gradient by a factor only the device knows."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_kernel(
    x_ptr,  # [n]
    factor_ptr,  # one fp32
    n,
    BLOCK: tl.constexpr,
):
    """Multiply in place; a factor of 1, the usual one, costs nothing but the launch."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
        tl.store(
            x_ptr + offs, (x.to(tl.float32) * factor).to(x_ptr.dtype.element_ty), mask=offs < n
        )
