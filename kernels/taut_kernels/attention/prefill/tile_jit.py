"""What the Gluon kernels of sm_90 share: tiles, barriers, rows in shared and in global memory.

See :mod:`.hopper_kernel`.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from taut_kernels.hopper import barrier


@gluon.jit
def sequence_bounds(cu_ptr, length, batch):
    """Return first token and tokens of a sequence; packed ones are found by ``cu_ptr``."""
    if cu_ptr is not None:
        start = gl.load(cu_ptr + batch)
        count = gl.load(cu_ptr + batch + 1) - start
    else:
        start = batch * 0
        count = length
    return start, count


SIZES = ["length_q", "length_k", "heads", "blocks", "sequences", "turns", "stride_lb", "stride_lh"]
"""Arguments of the kernels that no form of them is specialised for."""


@gluon.jit
def place_of(turn, sizes):
    """Return a program's ``turn``-th place, its head and batch, and whether there is such a place.

    Programs go there and back again, so that all have as much to do; neighbours are heads of the
    same keys and values.
    """
    _length_q, _length_k, heads, blocks, sequences = sizes
    program, programs = gl.program_id(0), gl.num_programs(0)
    place = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    inside = place < heads * blocks * sequences
    place = gl.minimum(place, heads * blocks * sequences - 1)
    return place, place % heads, (place // heads) % sequences, inside


@gluon.jit
def query_tile(turn, sizes, cu, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return a program's ``turn``-th tile.

    Returns batch, head, first query, start and count of queries, start and count of keys, and its
    blocks of keys: how many (0: none, or no tile) and how many of them every query sees whole.
    """
    length_q, length_k, heads, blocks, sequences = sizes
    place, head, batch, inside = place_of(turn, sizes)
    first_m = (blocks - 1 - place // (heads * sequences)) * 128
    start_q, count_q = sequence_bounds(cu[0], length_q, batch)
    start_k, count_k = sequence_bounds(cu[1], length_k, batch)
    # The last query of a sequence stands at its last key.
    lowest = first_m + count_k - count_q
    last, whole = count_k, count_k // BLOCK_N
    if CAUSAL:
        last = gl.minimum(last, gl.maximum(lowest + 128, 0))
        whole = gl.minimum(whole, gl.maximum(lowest + 1, 0) // BLOCK_N)
    count = (last + BLOCK_N - 1) // BLOCK_N
    some = inside & (first_m < count_q)
    count_q = gl.where(inside, count_q, 0)
    return (
        batch, head, first_m, start_q, count_q, start_k, count_k, gl.where(some, count, 0), whole,
    )  # fmt: skip


@gluon.jit
def clear_rows(slot, first, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr):
    """Set rows of a block from ``first`` on to 0: another sequence's, whose NaN times 0 is NaN.

    Both groups do so; they store the same values.
    """
    W: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    rows = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, W)), 1)
    slot.store(gl.where(rows < first, slot.load(W), 0.0))
    hopper.fence_async_shared()
    barrier()


@gluon.jit
def store_rows(
    rows_ptr, values, stride, first, count, D: gl.constexpr, BLOCK_D: gl.constexpr
):  # fmt: skip
    """Store a group's 64 rows from row ``first`` on, those below ``count``."""
    W: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    rows = first + gl.arange(0, 64, gl.SliceLayout(1, W))
    offs_d = gl.expand_dims(gl.arange(0, BLOCK_D, gl.SliceLayout(0, W)), 0)
    offsets = gl.expand_dims(gl.cast(rows, gl.int64) * stride, 1) + offs_d
    mask = gl.expand_dims(rows < count, 1)
    if D != BLOCK_D:
        mask = mask & (offs_d < D)
    values = gl.convert_layout(values.to(rows_ptr.dtype.element_ty), W)
    gl.store(rows_ptr + offsets, values, mask=mask)


@gluon.jit
def row_values(lse_ptr, delta_ptr, rows, count):
    """Load lse, in base 2, and delta; a row that is not there or sees no key has weights of 0."""
    lse = gl.load(lse_ptr + rows, mask=rows < count, other=float("inf"))
    lse = gl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    return lse, gl.load(delta_ptr + rows, mask=rows < count, other=0.0)
