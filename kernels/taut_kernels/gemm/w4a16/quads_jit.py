"""Quads of groups (:mod:`.layout`): where a step is in them, and their zero points unpacked.

Four groups of 16 rows are a quad: 32 words of scales and eight of zero points.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from taut_kernels.gemm.w4a16 import decode_ring_tile as tiles_decode_ring
from taut_kernels.gemm.w4a16.decode_ptx import MINUS_MAGIC

whole_quads = gluon.constexpr_function(tiles_decode_ring.whole_quads)
scale_lines = gluon.constexpr_function(tiles_decode_ring.scale_lines)
zero_quads = gluon.constexpr_function(tiles_decode_ring.zero_quads)


@gluon.jit
def zero_places(
    first_chunk,
    step,
    CHUNKS_PER_STEP: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    QUADS: gl.constexpr,  # of whole_quads
    L: gl.constexpr,
):
    """Return the place in its quad of the first group of a step."""
    place = 0
    if GROUP_SIZE and not QUADS:
        chunk = first_chunk + step * CHUNKS_PER_STEP
        place = chunk * 64 // GROUP_SIZE % 4
    return place


@gluon.constexpr_function
def _minus_magic(element):
    """Return the two floats -magic as a signed word."""
    return MINUS_MAGIC[element] - 2**32


@gluon.jit
def zero_offsets(words, place, ELEMENT: gl.constexpr):
    """Return the offsets -(magic + zero) of rows g and g + 8 for one group of packed quads."""
    MINUS: gl.constexpr = _minus_magic(ELEMENT)
    return ((words >> (4 * place)) & 0x000F000F) | MINUS
