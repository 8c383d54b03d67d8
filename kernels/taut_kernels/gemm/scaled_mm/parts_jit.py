"""Sums of groups of warps that share K on sm_90: the last to arrive adds all parts."""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from taut_kernels.hopper import barrier


@gluon.jit
def _by_register(acc):
    """Bring sums [64, COLS] into [COLS / 8, lanes, registers]: a lane's four lie together."""
    EIGHTS: gl.constexpr = acc.shape[1] // 8
    acc = gl.reshape(acc, (4, 2, 8, EIGHTS, 4, 2))
    return gl.reshape(gl.permute(acc, (3, 0, 2, 4, 1, 5)), (EIGHTS, 128, 4))


@gluon.jit
def _by_row(value, SUMS: gl.constexpr):
    """Undo :func:`_by_register`."""
    EIGHTS: gl.constexpr = value.shape[0]
    value = gl.reshape(value, (EIGHTS, 4, 8, 4, 2, 2))
    value = gl.reshape(gl.permute(value, (1, 4, 2, 0, 3, 5)), (64, EIGHTS * 8))
    return gl.convert_layout(value, SUMS, assert_trivial=True)


@gluon.jit
def _cells(partial_ptr, place, columns, COLS: gl.constexpr, SPLIT_K: gl.constexpr, C: gl.constexpr):
    """Point at a place's first part as :func:`_by_register` has it; say which columns count."""
    eight = gl.arange(0, COLS // 8, gl.SliceLayout(1, gl.SliceLayout(2, C)))
    lane = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, C)))
    register = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, C)))
    eight = gl.expand_dims(gl.expand_dims(eight, 1), 2)
    lane = gl.expand_dims(gl.expand_dims(lane, 0), 2)
    inside = lane * 4 + gl.expand_dims(gl.expand_dims(register, 0), 1)
    cells = partial_ptr + gl.cast(place, gl.int64) * (SPLIT_K * 64 * COLS)
    return cells + (eight * 512 + inside), eight * 8 + inside * 0 < columns


@gluon.jit
def add_parts(
    acc, partial_ptr, arrivals_ptr, place, split, columns,
    SPLIT_K: gl.constexpr, SUMS: gl.constexpr
):  # fmt: skip
    """Leave a part of some sums in memory; return (all parts' sum, True) in the last to arrive.

    Args:
        acc: [64, COLS], a group's part.
        partial_ptr: [places, SPLIT_K, 64 * COLS] of its type.
        arrivals_ptr: [places] int32, 0 before and after.
        place: which sums these are.
        split: which part, 0..SPLIT_K - 1.
        columns: of the sums that count; the others hold anything.
        SPLIT_K: parts.
        SUMS: the layout of ``acc``.
    """
    SIZE: gl.constexpr = acc.shape[0] * acc.shape[1]
    C: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, 4, 1], [2, 1, 0])
    cells, mask = _cells(partial_ptr, place, columns, acc.shape[1], SPLIT_K, C)
    part = gl.convert_layout(_by_register(acc), C, assert_trivial=True)
    gl.store(cells + split * SIZE, part, mask=mask)
    # Every thread's part is stored before one of them announces the program.
    barrier()
    arrived = gl.atomic_add(arrivals_ptr + place, 1, sem="acq_rel", scope="gpu")
    last = arrived == SPLIT_K - 1
    if last:
        # In order of the splits: the same bits from run to run. Past L1, which does not see what
        # other programs store.
        part = gl.load(cells, mask=mask, other=0, cache_modifier=".cg")
        for s in range(1, SPLIT_K):
            part += gl.load(cells + s * SIZE, mask=mask, other=0, cache_modifier=".cg")
        acc = _by_row(part, SUMS)
        gl.store(arrivals_ptr + place, 0)
    return acc, last
