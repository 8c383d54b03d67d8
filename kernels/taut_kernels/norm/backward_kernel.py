"""Jit functions of the norms' backward pass: RMSNorm ± residual, LayerNorm.

With x̂ = (x − μ) · rstd, g = dy · w: dx = rstd · (g − mean(g) − x̂ · mean(g · x̂)), dw = Σ dy · x̂ and
db = Σ dy over the rows; RMSNorm has μ = 0 and no mean(g).
"""

# ruff: noqa: RUF005, C901 (Triton's front end adds tuples and does not unpack them; a kernel is one
# function: its branches fall at compile time)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.norm.rms_norm_kernel import load_weight
from taut_kernels.rowwise.chunk_jit import load_chunk, store_chunk


@triton.jit
def _load_rows(rows, offs, mask_m, first: tl.constexpr, COUNT: tl.constexpr,
               BLOCK: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Load so many chunks of a tensor's rows."""
    loaded = ()
    for chunk in tl.static_range(first, first + COUNT):
        loaded = loaded + (load_chunk(rows, offs, mask_m, chunk * BLOCK, BLOCK, N),)
    return loaded


@triton.jit
def _load_chunks(x_rows, dy_rows, weight_ptr, offs, mask_m, first: tl.constexpr,
                 COUNT: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Load so many chunks of x, dy and the weight in turn; no weight where there is none."""
    xs, dys, weights = (), (), ()
    for chunk in tl.static_range(first, first + COUNT):
        xs = xs + (load_chunk(x_rows, offs, mask_m, chunk * BLOCK, BLOCK, N),)
        dys = dys + (load_chunk(dy_rows, offs, mask_m, chunk * BLOCK, BLOCK, N),)
        if weight_ptr is not None:
            weights = weights + (load_weight(weight_ptr, offs, chunk * BLOCK, BLOCK, N),)
    return xs, dys, weights


@triton.jit
def _means(g_sums, gx_sums, rstd, N: tl.constexpr, CENTRED: tl.constexpr, AGAIN: tl.constexpr):
    """Return the rows' means of g, 0 without a mean of x, and of g · x̂."""
    g_mean = 0.0
    if CENTRED and not AGAIN:
        # Both at once: half of the shuffles' latency, and half of the barriers.
        g_sum, gx_sum = tl.split(tl.sum(tl.join(g_sums, gx_sums), axis=1))
        g_mean = g_sum[:, None] / N
        gx_mean = gx_sum[:, None] * rstd / N
    else:
        gx_mean = tl.sum(gx_sums, axis=1)[:, None] * rstd / N
        if CENTRED:
            g_mean = tl.sum(g_sums, axis=1)[:, None] / N
    return g_mean, gx_mean


@triton.jit
def _store_part(part_ptr, sums, offs, BLOCK: tl.constexpr, N: tl.constexpr):
    """Store a program's sums over its rows."""
    for chunk in tl.static_range(len(sums)):
        offs_n = chunk * BLOCK + offs
        tl.store(part_ptr + offs_n, tl.sum(sums[chunk], axis=0), mask=offs_n < N)


@triton.jit(do_not_specialize=["M"])
def norm_backward_kernel(
    x_ptr,  # [M, N], what was normalised; columns next to each other
    dy_ptr,  # [M, N], columns next to each other
    added_ptr,  # [M, N], added to dx: the gradient of x + residual; or None
    weight_ptr,  # [N] or None
    mean_ptr,  # [M] fp32, or None (RMSNorm)
    rstd_ptr,  # [M] fp32
    dx_ptr,  # [M, N], contiguous
    dw_ptr,  # [programs, N] fp32, or None
    db_ptr,  # [programs, N] fp32, or None
    M,
    stride_xm,
    stride_dm,
    stride_am,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """Each program owns every G-th block of rows, and sums its part of dw and db in registers.

    With AGAIN x and dy are read a second time (from L1) when the row's sums are there, instead of
    being held: a long row's sums of dw take half of the registers.
    """
    CHUNKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    CENTRED: tl.constexpr = mean_ptr is not None
    # How many steps' loads are issued before the first is waited for.
    FEW: tl.constexpr = 4 if CHUNKS % 4 == 0 else 1
    GROUP: tl.constexpr = FEW if AGAIN else CHUNKS
    offs = tl.arange(0, BLOCK)
    pid = tl.program_id(0)
    dws = ()
    for _ in tl.static_range(CHUNKS):
        dws = dws + (tl.zeros((ROWS, BLOCK), dtype=tl.float32),)
    dbs = dws
    weights = ()
    if weight_ptr is not None and not AGAIN:
        # Not in the loop: there it would be loaded ahead for each row, through shared memory.
        for chunk in tl.static_range(CHUNKS):
            weights = weights + (load_weight(weight_ptr, offs, chunk * BLOCK, BLOCK, N),)
    for first in tl.range(pid * ROWS, M, tl.num_programs(0) * ROWS, num_stages=STAGES):
        offs_m = first + tl.arange(0, ROWS)
        mask_m = offs_m < M
        rows = offs_m.to(tl.int64)[:, None]
        x_rows = x_ptr + rows * stride_xm
        dy_rows = dy_ptr + rows * stride_dm
        dx_rows = dx_ptr + rows * N
        rstd = tl.load(rstd_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        mean = 0.0
        if CENTRED:
            mean = tl.load(mean_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        xs = ()
        dys = ()
        if not AGAIN:
            xs, dys, _none = _load_chunks(x_rows, dy_rows, None, offs, mask_m, 0, CHUNKS, BLOCK, N)
        g_sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        gx_sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        if AGAIN:
            # Not unrolled as a whole: no more loads in flight than there are registers for.
            for start in tl.range(0, N, BLOCK, loop_unroll_factor=GROUP):
                columns = start + offs
                mask = mask_m[:, None] & (columns < N)[None, :]
                x = tl.load(x_rows + columns[None, :], mask=mask, other=0.0).to(tl.float32)
                g = tl.load(dy_rows + columns[None, :], mask=mask, other=0.0).to(tl.float32)
                if weight_ptr is not None:
                    weight = tl.load(weight_ptr + columns, mask=columns < N, other=0.0)
                    g = g * weight.to(tl.float32)[None, :]
                gx_sums += g * (x - mean)
                if CENTRED:
                    g_sums += g
        else:
            for chunk in tl.static_range(CHUNKS):
                g = dys[chunk].to(tl.float32)
                if weight_ptr is not None:
                    g = g * weights[chunk].to(tl.float32)[None, :]
                gx_sums += g * (xs[chunk].to(tl.float32) - mean)
                if CENTRED:
                    g_sums += g
        g_mean, gx_mean = _means(g_sums, gx_sums, rstd, N, CENTRED, AGAIN)
        new_dws = ()
        new_dbs = ()
        factors = weights
        for chunk in tl.static_range(CHUNKS):
            if AGAIN and chunk % GROUP == 0:
                xs, dys, factors = _load_chunks(
                    x_rows, dy_rows, weight_ptr, offs, mask_m, chunk, GROUP, BLOCK, N
                )
            if added_ptr is not None and chunk % GROUP == 0:
                added_rows = added_ptr + rows * stride_am
                added = _load_rows(added_rows, offs, mask_m, chunk, GROUP, BLOCK, N)
            x_hat = (xs[chunk % GROUP].to(tl.float32) - mean) * rstd
            dy = dys[chunk % GROUP].to(tl.float32)
            g = dy
            if weight_ptr is not None:
                g = g * factors[chunk % GROUP].to(tl.float32)[None, :]
            # Differences first: what is nearly 0 (rows of one column) keeps its digits.
            dx = (g - g_mean - x_hat * gx_mean) * rstd
            if added_ptr is not None:
                dx += added[chunk % GROUP].to(tl.float32)
            store_chunk(dx_rows, dx, offs, mask_m, chunk * BLOCK, BLOCK, N)
            if dw_ptr is not None:
                new_dws = new_dws + (dws[chunk] + dy * x_hat,)
            if db_ptr is not None:
                new_dbs = new_dbs + (dbs[chunk] + dy,)
        if dw_ptr is not None:
            dws = new_dws
        if db_ptr is not None:
            dbs = new_dbs
    part = pid.to(tl.int64) * N
    if dw_ptr is not None:
        _store_part(dw_ptr + part, dws, offs, BLOCK, N)
    if db_ptr is not None:
        _store_part(db_ptr + part, dbs, offs, BLOCK, N)


@triton.jit
def _column_sums(
    parts_ptr, sums_ptr, programs, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    offs_n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    offs_p = tl.arange(0, ROWS)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, programs, ROWS):
        rows = start + offs_p
        mask = (rows < programs)[:, None] & (offs_n < N)[None, :]
        ptrs = parts_ptr + rows.to(tl.int64)[:, None] * N + offs_n[None, :]
        sums += tl.load(ptrs, mask=mask, other=0.0)
    total = tl.sum(sums, axis=0)
    tl.store(sums_ptr + offs_n, total.to(sums_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit(do_not_specialize=["programs"])
def column_sums_kernel(
    parts_ptr,  # [programs, N] fp32
    sums_ptr,  # [N]
    other_parts_ptr,  # [programs, N] fp32 or None: of a second gradient, axis 1 of the grid
    other_sums_ptr,  # [N] or None
    programs,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the programs' parts, always in the same order."""
    if tl.program_id(1) == 0:
        _column_sums(parts_ptr, sums_ptr, programs, N, ROWS, COLUMNS)
    elif other_parts_ptr is not None:
        _column_sums(other_parts_ptr, other_sums_ptr, programs, N, ROWS, COLUMNS)
