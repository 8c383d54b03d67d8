"""Jit functions of the norms' backward pass for rows that no program can hold the sums of.

Two walks instead of one: dx by rows, which reads x and dy twice (from L2), and the parts of dw and
db by blocks of columns, which reads them a third time.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(ptrs, mask):
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def norm_dx_long_kernel(
    x_ptr, dy_ptr, added_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, M, stride_xm, stride_dm,
    stride_am, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Arguments as :func:`.norm_backward_kernel`; one row a program."""
    CENTRED: tl.constexpr = mean_ptr is not None
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x_row = x_ptr + row * stride_xm
    dy_row = dy_ptr + row * stride_dm
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if CENTRED:
        mean = tl.load(mean_ptr + row)
    g_sums = tl.zeros((BLOCK,), dtype=tl.float32)
    gx_sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, N, BLOCK):
        mask = start + offs < N
        g = _load(dy_row + start + offs, mask)
        if weight_ptr is not None:
            g = g * _load(weight_ptr + start + offs, mask)
        gx_sums += g * (_load(x_row + start + offs, mask) - mean)
        if CENTRED:
            g_sums += g
    gx_mean = tl.sum(gx_sums, axis=0) * rstd / N
    g_mean = 0.0
    if CENTRED:
        g_mean = tl.sum(g_sums, axis=0) / N
    for start in range(0, N, BLOCK):
        mask = start + offs < N
        g = _load(dy_row + start + offs, mask)
        if weight_ptr is not None:
            g = g * _load(weight_ptr + start + offs, mask)
        x_hat = (_load(x_row + start + offs, mask) - mean) * rstd
        dx = (g - g_mean - x_hat * gx_mean) * rstd
        if added_ptr is not None:
            dx += _load(added_ptr + row * stride_am + start + offs, mask)
        tl.store(dx_ptr + row * N + start + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def norm_columns_kernel(
    x_ptr,  # [M, N]
    dy_ptr,  # [M, N]
    mean_ptr,  # [M] fp32, or None (RMSNorm)
    rstd_ptr,  # [M] fp32
    dw_ptr,  # [programs of axis 1, N] fp32
    db_ptr,  # [programs of axis 1, N] fp32, or None
    M,
    stride_xm,
    stride_dm,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of columns (axis 0) over every G-th block of rows (axis 1)."""
    CENTRED: tl.constexpr = mean_ptr is not None
    part = tl.program_id(1)
    offs_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    db = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(part * ROWS, M, tl.num_programs(1) * ROWS):
        offs_m = first + tl.arange(0, ROWS)
        mask_m = offs_m < M
        mask = mask_m[:, None] & (offs_n < N)[None, :]
        rows = offs_m.to(tl.int64)[:, None]
        dy = _load(dy_ptr + rows * stride_dm + offs_n[None, :], mask)
        x = _load(x_ptr + rows * stride_xm + offs_n[None, :], mask)
        if CENTRED:
            x = x - _load(mean_ptr + offs_m, mask_m)[:, None]
        dw += dy * x * _load(rstd_ptr + offs_m, mask_m)[:, None]
        if db_ptr is not None:
            db += dy
    ptrs = dw_ptr + part.to(tl.int64) * N + offs_n
    tl.store(ptrs, tl.sum(dw, axis=0), mask=offs_n < N)
    if db_ptr is not None:
        ptrs = db_ptr + part.to(tl.int64) * N + offs_n
        tl.store(ptrs, tl.sum(db, axis=0), mask=offs_n < N)
