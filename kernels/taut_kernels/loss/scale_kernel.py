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
    """Multiply in place; a factor of 1, the usual one, costs nothing but the launch.

    Programs walk over the blocks: to start one for each of 8192 × 128256 logits' blocks takes
    170 µs on an H200, only to find that there is nothing to do.
    """
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        # The interpreter's loop variable is a Python integer, a compiled one has 32 bits.
        zero = tl.full((), 0, tl.int64)
        for block in tl.range(tl.program_id(0), (n - 1) // BLOCK + 1, tl.num_programs(0)):
            offs = (zero + block) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
            scaled = (x.to(tl.float32) * factor).to(x_ptr.dtype.element_ty)
            tl.store(x_ptr + offs, scaled, mask=offs < n)
