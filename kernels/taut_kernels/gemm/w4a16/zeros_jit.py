"""Packed zero points in kernels whose tensors have four elements a lane.

A quad's zero points of rows g and g + 8 are one word (:mod:`.layout`), which the
four lanes of g share and every element of theirs needs. So they are loaded, and wait in registers,
as a tensor of one element a lane.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lane_axis(WARPS: tl.constexpr):
    """Return [32 · WARPS, 1]: the lanes of warps that take a row tile each."""
    return tl.arange(0, 32 * WARPS)[:, None]


@triton.jit
def lane_pointers(zeros_ptr, quad, lane):
    """Return pointers to each lane's word of a quad, counted through all row tiles."""
    return zeros_ptr + (quad * 8 + lane % 32 // 4)


@triton.jit
def every_element(words):
    """Repeat words of a lane each, [lanes, 1], for its four elements: [4 · lanes]."""
    return tl.reshape(tl.broadcast_to(words, (words.shape[0], 4)), (4 * words.shape[0],))
