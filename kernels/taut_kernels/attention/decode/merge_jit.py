"""Jit functions of :mod:`.op`: parts of a softmax become one."""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_of_warps(x, WARPS: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    """Return the sum of [WARPS, M, D] over its first axis.

    By halves: `tl.split` brings two of a number into one thread, by a conversion without bank
    conflicts. `tl.sum` over warps, Triton 3.6, stores and loads number by number (README).
    """
    if WARPS == 1:
        total = tl.reshape(x, (M, D))
    else:
        pairs = tl.permute(tl.reshape(x, (2, WARPS // 2, M, D)), (1, 2, 3, 0))
        first, second = tl.split(pairs)
        total = sum_of_warps(first + second, WARPS // 2, M, D)
    return total


@triton.jit
def first_rows(x, KEPT: tl.constexpr):
    """Return the first KEPT of 16 rows, KEPT 8 or 16, of [WARPS, 16, D] or [WARPS, 16].

    A thread of a product has rows 8 apart: nothing moves.
    """
    if KEPT == 16:
        kept = x
    elif len(x.shape) == 3:
        kept, _ = tl.split(
            tl.permute(tl.reshape(x, (x.shape[0], 2, KEPT, x.shape[2])), (0, 2, 3, 1))
        )
    else:
        kept, _ = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, KEPT)), (0, 2, 1)))
    return kept


@triton.jit
def merged_warps(acc, row_max, row_sum, WARPS: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    """Merge [WARPS, M, D], [WARPS, M], [WARPS, M] over warps; return [M, D], [M], [M]."""
    highest = tl.max(row_max, 0)
    # A part, or all of them, may have seen no key: ∞ − ∞ would be NaN.
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(row_max - shift[None, :])
    total = tl.sum(row_sum * weight, 0)
    return sum_of_warps(acc * weight[:, :, None], WARPS, M, D), highest, total


@triton.jit
def leave_part(
    acc,
    row_max,
    row_sum,
    partial_ptr,  # [ROWS, D] fp32 of this program
    stats_ptr,  # [2, ROWS] fp32 of this program
    arrival_ptr,  # of this program's rows, int32
    active,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Store this program's part; say whether it is the last of ``active`` to do so."""
    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    real = offs_m < ROWS
    mask = real[:, None] & (offs_d < D)[None, :]
    tl.store(partial_ptr + offs_m[:, None] * D + offs_d[None, :], acc, mask=mask)
    tl.store(stats_ptr + offs_m, row_max, mask=real)
    tl.store(stats_ptr + ROWS + offs_m, row_sum, mask=real)
    # Every thread's part is stored before one of them announces the program.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu")
    last = arrived == active - 1
    if last:
        tl.store(arrival_ptr, 0)
    return last


@triton.jit
def load_parts(partial_ptr, stats_ptr, first, active, D: tl.constexpr, BLOCK_D: tl.constexpr,
               ROWS: tl.constexpr, BLOCK_R: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
    """Ask for UNROLL parts from `first` on; return their sums and maxima, two tuples."""
    offs_r, offs_d = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_D)[None, :]
    # One address each: the rest is in the instructions.
    part_ptr = partial_ptr + first * (ROWS * D) + (offs_r * D + offs_d)
    rows_ptr = stats_ptr + first * (2 * ROWS) + offs_r
    parts, maxima = (), ()
    for i in tl.static_range(UNROLL):
        # All or none: a mask of one number alone is not known to the interpreter.
        there = (offs_r < ROWS) & (offs_r < (active - first - i) * BLOCK_R)
        at, of = part_ptr + i * (ROWS * D), rows_ptr + i * (2 * ROWS)
        maxima += (tl.load(of, there, float("-inf"), cache_modifier=".cg"),)
        parts += (tl.load(at, there & (offs_d < D), 0.0, cache_modifier=".cg"),)
    return parts, maxima


@triton.jit
def merged_splits(
    partial_ptr,  # [splits, ROWS, D] fp32
    stats_ptr,  # [splits, 2, ROWS] fp32
    active,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,  # ROWS up to a power of two
    UNROLL: tl.constexpr,  # splits whose loads are under way at once, a power of two
):
    """Merge what all programs of these rows left; return [BLOCK_R, BLOCK_D], [BLOCK_R] (the sum).

    UNROLL parts at a time: all their loads, their maximum, then a plain weighted sum. In order of
    the splits, so that the bits do not change from run to run; past L1, which does not see what
    other programs store. Maxima are loaded twice, once for what threads work out together and once
    for the weights of their own columns: to hand them on would cost more.
    """
    offs_r, offs_u = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, UNROLL)[None, :]
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    highest = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    for first in range(0, active, UNROLL):
        there = (offs_r < ROWS) & (first + offs_u < active)
        rows_ptr = stats_ptr + first * (2 * ROWS) + (offs_u * (2 * ROWS) + offs_r)
        part_max = tl.load(rows_ptr, there, float("-inf"), cache_modifier=".cg")
        part_sum = tl.load(rows_ptr + ROWS, there, 0.0, cache_modifier=".cg")
        parts, maxima = load_parts(
            partial_ptr, stats_ptr, first, active, D, BLOCK_D, ROWS, BLOCK_R, UNROLL
        )
        new_max = tl.maximum(highest, tl.max(part_max, 1))
        # A part, or all of them, may have seen no key: ∞ − ∞ would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(part_sum * tl.exp2(part_max - shift[:, None]), 1)
        acc, highest = acc * decay[:, None], new_max
        for i in tl.static_range(UNROLL):
            acc += parts[i] * tl.exp2(maxima[i] - shift[:, None])
    return acc, total


@triton.jit
def store_rows(acc, total, v_scale, o_ptr, first_row, rows_end, stride_ot, stride_oh,
               D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
               BLOCK_R: tl.constexpr):  # fmt: skip
    """Divide [BLOCK_R, BLOCK_D] by the sums of weights and store the rows that are there."""
    offs_row, offs_d = first_row + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    places = (offs_row // GROUP).to(tl.int64) * stride_ot + (offs_row % GROUP) * stride_oh
    out = acc * (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    mask = (offs_row < rows_end)[:, None] & (offs_d < D)[None, :]
    tl.store(o_ptr + places[:, None] + offs_d[None, :], out.to(o_ptr.dtype.element_ty), mask=mask)
