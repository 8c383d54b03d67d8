"""Jit functions of the norms' training forward: RMSNorm ± residual, LayerNorm."""

# ruff: noqa: RUF005, C901 (Triton's front end adds tuples and does not unpack them; a kernel is one
# function: its branches fall at compile time)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.norm.rms_norm_kernel import load_weight, scaled
from taut_kernels.rowwise.chunk_jit import (
    load_rows,
    load_sum,
    rows_of_program,
    store_chunk,
)


@triton.jit
def _output(x_hat, weight, bias, y_type: tl.constexpr, CENTRED: tl.constexpr):
    """Return the output: RMSNorm rounds before its weight, LayerNorm at the store only."""
    if CENTRED:
        if weight is not None:
            x_hat = x_hat * weight.to(tl.float32)
        if bias is not None:
            x_hat = x_hat + bias.to(tl.float32)
    else:
        x_hat = scaled(x_hat, 1.0, weight, y_type)
    return x_hat


@triton.jit(do_not_specialize=["M"])
def norm_kernel(
    x_ptr,  # [M, N], columns next to each other
    residual_ptr,  # [M, N], columns next to each other, or None
    weight_ptr,  # [N] or None
    bias_ptr,  # [N] or None
    y_ptr,  # [M, N], contiguous
    sum_ptr,  # [M, N], contiguous: x + residual; None without a residual
    mean_ptr,  # [M] fp32, or None (not CENTRED)
    rstd_ptr,  # [M] fp32
    M,
    stride_xm,
    stride_rm,
    epsilon,
    N: tl.constexpr,
    CENTRED: tl.constexpr,  # LayerNorm; else RMSNorm
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Whole rows a program, held in registers."""
    CHUNKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    HAS_RESIDUAL: tl.constexpr = residual_ptr is not None
    x_type: tl.constexpr = x_ptr.dtype.element_ty
    offs_m, mask_m = rows_of_program(M, ROWS)
    rows = offs_m.to(tl.int64)[:, None]
    offs = tl.arange(0, BLOCK)
    x_rows, y_rows = x_ptr + rows * stride_xm, y_ptr + rows * N
    # Every load is issued before the first sum waits for one.
    weights = ()
    xs = load_rows(x_rows, offs, mask_m, CHUNKS, BLOCK, N)
    if HAS_RESIDUAL:
        residual_rows = residual_ptr + rows * stride_rm
        sum_rows = sum_ptr + rows * N
        residuals = load_rows(residual_rows, offs, mask_m, CHUNKS, BLOCK, N)
    # LayerNorm's parameters come later: with both of them a long row does not fit into registers.
    if weight_ptr is not None and not CENTRED:
        for chunk in tl.static_range(CHUNKS):
            weights = weights + (load_weight(weight_ptr, offs, chunk * BLOCK, BLOCK, N),)

    sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    squares = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    ts = ()
    for chunk in tl.static_range(CHUNKS):
        t = xs[chunk].to(tl.float32)
        if HAS_RESIDUAL:
            t = t + residuals[chunk].to(tl.float32)
            store_chunk(sum_rows, t, offs, mask_m, chunk * BLOCK, BLOCK, N)
        ts = ts + (t,)
        if CENTRED:
            sums += t
        else:
            squares = tl.fma(t, t, squares)
    if CENTRED:
        mean = tl.sum(sums, axis=1) / N
        tl.store(mean_ptr + offs_m, mean, mask=mask_m)
        differences = ()
        for chunk in tl.static_range(CHUNKS):
            t = ts[chunk] - mean[:, None]
            if (chunk + 1) * BLOCK > N:
                t = tl.where((chunk * BLOCK + offs < N)[None, :], t, 0.0)
            differences = differences + (t,)
            squares = tl.fma(t, t, squares)
        ts = differences
    rstd = tl.rsqrt(tl.sum(squares, axis=1) / N + epsilon)
    tl.store(rstd_ptr + offs_m, rstd, mask=mask_m)
    for chunk in tl.static_range(CHUNKS):
        weight = None
        bias = None
        if weight_ptr is not None:
            if CENTRED:
                weight = load_weight(weight_ptr, offs, chunk * BLOCK, BLOCK, N)[None, :]
            else:
                weight = weights[chunk][None, :]
        if bias_ptr is not None:
            bias = load_weight(bias_ptr, offs, chunk * BLOCK, BLOCK, N)[None, :]
        y = _output(ts[chunk] * rstd[:, None], weight, bias, x_type, CENTRED)
        store_chunk(y_rows, y, offs, mask_m, chunk * BLOCK, BLOCK, N)


@triton.jit(do_not_specialize=["M"])
def norm_long_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    M,
    stride_xm,
    stride_rm,
    epsilon,
    N: tl.constexpr,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,  # 1
    BLOCK: tl.constexpr,
):
    """Arguments as :func:`norm_kernel`; a row is read again from L2 for every pass."""
    tl.static_assert(ROWS == 1)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x_row = x_ptr + row * stride_xm
    residual_row = residual_ptr
    if residual_ptr is not None:
        residual_row = residual_ptr + row * stride_rm
    mean = 0.0
    if CENTRED:
        sums = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, N, BLOCK):
            sums += load_sum(x_row, residual_row, start + offs, N)
        mean = tl.sum(sums, axis=0) / N
        tl.store(mean_ptr + row, mean)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, N, BLOCK):
        t = load_sum(x_row, residual_row, start + offs, N)
        if CENTRED:
            t = tl.where(start + offs < N, t - mean, 0.0)
        squares = tl.fma(t, t, squares)
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / N + epsilon)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, N, BLOCK):
        offs_n = start + offs
        t = load_sum(x_row, residual_row, offs_n, N)
        if residual_ptr is not None:
            tl.store(sum_ptr + row * N + offs_n, t.to(sum_ptr.dtype.element_ty), mask=offs_n < N)
        weight = None
        bias = None
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + offs_n, mask=offs_n < N, other=0.0)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
        y = _output((t - mean) * rstd, weight, bias, x_ptr.dtype.element_ty, CENTRED)
        tl.store(y_ptr + row * N + offs_n, y.to(y_ptr.dtype.element_ty), mask=offs_n < N)
