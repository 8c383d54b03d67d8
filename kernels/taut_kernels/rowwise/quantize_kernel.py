"""Jit functions of :mod:`.op`."""


# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.rowwise.chunk_jit import (
    load_rows,
    row_starts,
    rows_of_program,
    start_early,
    store_quantized,
)
from taut_kernels.rowwise.packed_jit import larger_magnitude
from taut_kernels.rowwise.row_quant import quantize, row_scale


@triton.jit(do_not_specialize=["M"])
def row_quant_kernel(
    x_ptr,  # [M, N], columns next to each other
    y_ptr,  # [M, N] 8-bit, contiguous
    scale_ptr,  # [M] fp32
    M,
    stride_xm,
    N: tl.constexpr,
    OUT: tl.constexpr,  # fp8, int8
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Whole rows a program, held in registers as they are stored."""
    start_early(PDL)
    CHUNKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    offs_m, mask_m = rows_of_program(M, ROWS)
    offs = tl.arange(0, BLOCK)
    x_rows, y_rows = row_starts(x_ptr, offs_m, stride_xm), row_starts(y_ptr, offs_m, N)
    xs = load_rows(x_rows, offs, mask_m, CHUNKS, BLOCK, N)
    largest = tl.zeros((ROWS, BLOCK), dtype=x_ptr.dtype.element_ty)
    for chunk in tl.static_range(CHUNKS):
        largest = larger_magnitude(largest, xs[chunk])
    store_quantized(xs, largest, y_rows, scale_ptr, offs_m, mask_m, offs, CHUNKS, BLOCK, N, OUT)


@triton.jit(do_not_specialize=["M"])
def row_quant_long_kernel(
    x_ptr, y_ptr, scale_ptr, M, stride_xm, N: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Arguments as :func:`row_quant_kernel`, one row; it is read a second time from L2."""
    start_early(PDL)
    tl.static_assert(ROWS == 1)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x_row = x_ptr + row * stride_xm
    largest = tl.zeros((BLOCK,), dtype=x_ptr.dtype.element_ty)
    for start in range(0, N, BLOCK):
        x = tl.load(x_row + start + offs, mask=start + offs < N, other=0.0)
        largest = larger_magnitude(largest, x)
    scale = row_scale(tl.max(largest, axis=0), OUT)
    tl.store(scale_ptr + row, scale)
    reciprocal = tl.div_rn(1.0, scale)
    for start in range(0, N, BLOCK):
        offs_n = start + offs
        x = tl.load(x_row + offs_n, mask=offs_n < N, other=0.0)
        q = quantize(x, scale, reciprocal, OUT)
        tl.store(y_ptr + row * N + offs_n, q.to(y_ptr.dtype.element_ty), mask=offs_n < N)
