"""Jit functions of :mod:`.op`."""

# ruff: noqa: RUF005 (Triton's front end adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,misc,no-untyped-def,untyped-decorator,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.rowwise.chunk_jit import load_chunk, row_starts, rows_of_program, store_chunk
from taut_kernels.rowwise.opaque_jit import opaque


@triton.jit
def _load_or_lowest(
    row_ptrs, offs, mask_m, START: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr
):
    """Load columns START.. as [ROWS, BLOCK]; columns beyond the row read as −inf."""
    ptrs = row_ptrs + (START + offs)[None, :]
    if START + BLOCK > N:
        mask = mask_m[:, None] & (START + offs < N)[None, :]
        chunk = tl.load(ptrs, mask=mask, other=float("-inf"))
    elif row_ptrs.shape[0] > 1:
        chunk = tl.load(ptrs, mask=mask_m[:, None], other=float("-inf"))
    else:
        # A single row always exists: no mask, so that the load is not predicated.
        chunk = tl.load(ptrs)
    return chunk


@triton.jit(do_not_specialize=["M"])
def softmax_kernel(
    x_ptr,  # [M, N], columns next to each other
    y_ptr,  # [M, N], contiguous
    M,
    stride_xm,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AGAIN: tl.constexpr,
    OPAQUE: tl.constexpr,  # with AGAIN, for 16-bit types
):
    """Whole rows a program, held in registers.

    With AGAIN the exponentials are computed a second time, by another formula, so that a thread
    holds its columns in the 16 bits they came in and not in 32.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    CHUNKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    offs_m, mask_m = rows_of_program(M, ROWS)
    offs = tl.arange(0, BLOCK)
    x_rows, y_rows = row_starts(x_ptr, offs_m, stride_xm), row_starts(y_ptr, offs_m, N)
    xs = ()
    for chunk in tl.static_range(CHUNKS):
        xs = xs + (_load_or_lowest(x_rows, offs, mask_m, chunk * BLOCK, BLOCK, N),)
    # In the inputs' type, which a maximum does not leave: two to a register where they are halves.
    largest = xs[0]
    for chunk in tl.static_range(1, CHUNKS):
        largest = tl.maximum(largest, xs[chunk])
    maximum = tl.max(largest.to(tl.float32), axis=1)[:, None]
    sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    exponentials = ()
    for chunk in tl.static_range(CHUNKS):
        # The difference first: a product with log2 e in front of it could overflow.
        x = opaque(xs[chunk], OPAQUE).to(tl.float32)
        exponential = tl.exp2((x - maximum) * LOG2E)
        sums += exponential
        if not AGAIN:
            exponentials = exponentials + (exponential,)
    total = tl.sum(sums, axis=1)[:, None]
    if AGAIN:
        log2_total = tl.log2(total)
        for chunk in tl.static_range(CHUNKS):
            x = opaque(xs[chunk], OPAQUE).to(tl.float32)
            y = tl.exp2((x - maximum) * LOG2E - log2_total)
            store_chunk(y_rows, y, offs, mask_m, chunk * BLOCK, BLOCK, N)
    else:
        reciprocal = 1.0 / total
        for chunk in tl.static_range(CHUNKS):
            y = exponentials[chunk] * reciprocal
            store_chunk(y_rows, y, offs, mask_m, chunk * BLOCK, BLOCK, N)


@triton.jit(do_not_specialize=["M"])
def softmax_long_kernel(
    x_ptr,
    y_ptr,
    M,
    stride_xm,
    N: tl.constexpr,
    ROWS: tl.constexpr,  # 1
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Arguments as :func:`softmax_kernel`; a row is read twice, the second time from its end.

    What was read last is in L2 still: from the end a cache smaller than the rows in flight keeps a
    part of them, from the start none. Each group of LANE neighbouring columns, which one thread
    holds, has a running maximum and a running sum: one reduction over the row, one exponential an
    element and one more a group.
    """
    tl.static_assert(ROWS == 1)
    LOG2E: tl.constexpr = 1.4426950408889634
    LANE: tl.constexpr = 8
    STEPS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    FIRST: tl.constexpr = "evict_last" if KEEP else ""
    LAST: tl.constexpr = "evict_first" if KEEP else ""
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * stride_xm
    y_row = y_ptr + row * N
    groups = tl.arange(0, BLOCK // LANE)
    offs = groups[:, None] * LANE + tl.arange(0, LANE)[None, :]
    maxima = tl.full((BLOCK // LANE,), float("-inf"), dtype=tl.float32)
    sums = tl.zeros((BLOCK // LANE,), dtype=tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        columns = step * BLOCK + offs
        mask = columns < N
        x = tl.load(x_row + columns, mask=mask, other=float("-inf"), eviction_policy=FIRST)
        x = x.to(tl.float32)
        raised = tl.maximum(maxima, tl.max(x, axis=1))
        # Nothing but −inf so far: −inf − −inf would be NaN.
        shift = tl.where(raised == float("-inf"), 0.0, raised)
        added = tl.sum(tl.exp2((x - shift[:, None]) * LOG2E), axis=1)
        sums = sums * tl.exp2((maxima - shift) * LOG2E) + added
        maxima = raised
    maximum = tl.max(maxima, axis=0)
    # A row of −inf alone has a sum of 0 here and NaN in the result, as in torch.
    shift = tl.where(maxima == float("-inf"), maximum, maxima)
    total = tl.sum(sums * tl.exp2((shift - maximum) * LOG2E), axis=0)
    reciprocal = 1.0 / total
    for step in tl.range(0, STEPS, num_stages=STAGES):
        columns = (STEPS - 1 - step) * BLOCK + offs
        mask = columns < N
        x = tl.load(x_row + columns, mask=mask, other=0.0, eviction_policy=LAST)
        y = tl.exp2((x.to(tl.float32) - maximum) * LOG2E) * reciprocal
        y = y.to(y_ptr.dtype.element_ty)
        tl.store(y_row + columns, y, mask=mask, eviction_policy=LAST)


@triton.jit(do_not_specialize=["M"])
def softmax_backward_kernel(
    dy_ptr,  # [M, N], columns next to each other
    y_ptr,  # [M, N], columns next to each other
    dx_ptr,  # [M, N], contiguous
    M,
    stride_dm,
    stride_ym,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OPAQUE: tl.constexpr,  # for long rows of 16-bit types
):
    """Whole rows a program, held in registers."""
    CHUNKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    offs_m, mask_m = rows_of_program(M, ROWS)
    rows = offs_m.to(tl.int64)[:, None]
    offs = tl.arange(0, BLOCK)
    dys = ()
    ys = ()
    for chunk in tl.static_range(CHUNKS):
        dys = dys + (load_chunk(dy_ptr + rows * stride_dm, offs, mask_m, chunk * BLOCK, BLOCK, N),)
        ys = ys + (load_chunk(y_ptr + rows * stride_ym, offs, mask_m, chunk * BLOCK, BLOCK, N),)
    sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for chunk in tl.static_range(CHUNKS):
        sums += ys[chunk].to(tl.float32) * dys[chunk].to(tl.float32)
    total = tl.sum(sums, axis=1)[:, None]
    for chunk in tl.static_range(CHUNKS):
        y = opaque(ys[chunk], OPAQUE).to(tl.float32)
        dx = y * (opaque(dys[chunk], OPAQUE).to(tl.float32) - total)
        store_chunk(dx_ptr + rows * N, dx, offs, mask_m, chunk * BLOCK, BLOCK, N)


@triton.jit(do_not_specialize=["M"])
def softmax_backward_long_kernel(
    dy_ptr,
    y_ptr,
    dx_ptr,
    M,
    stride_dm,
    stride_ym,
    N: tl.constexpr,
    ROWS: tl.constexpr,  # 1
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Arguments as :func:`softmax_long_kernel`; the second read is from the row's end."""
    tl.static_assert(ROWS == 1)
    STEPS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    FIRST: tl.constexpr = "evict_last" if KEEP else ""
    LAST: tl.constexpr = "evict_first" if KEEP else ""
    row = tl.program_id(0).to(tl.int64)
    dy_row = dy_ptr + row * stride_dm
    y_row = y_ptr + row * stride_ym
    dx_row = dx_ptr + row * N
    offs = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        columns = step * BLOCK + offs
        mask = columns < N
        dy = tl.load(dy_row + columns, mask=mask, other=0.0, eviction_policy=FIRST)
        y = tl.load(y_row + columns, mask=mask, other=0.0, eviction_policy=FIRST)
        sums += y.to(tl.float32) * dy.to(tl.float32)
    total = tl.sum(sums, axis=0)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        columns = (STEPS - 1 - step) * BLOCK + offs
        mask = columns < N
        dy = tl.load(dy_row + columns, mask=mask, other=0.0, eviction_policy=LAST)
        y = tl.load(y_row + columns, mask=mask, other=0.0, eviction_policy=LAST)
        dx = y.to(tl.float32) * (dy.to(tl.float32) - total)
        dx = dx.to(dx_ptr.dtype.element_ty)
        tl.store(dx_row + columns, dx, mask=mask, eviction_policy=LAST)
