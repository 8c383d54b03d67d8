"""Jit functions of :mod:`.rms_norm`."""

# ruff: noqa: RUF005, C901 (Triton's front end adds tuples and does not unpack them; a kernel is one
# function: its branches fall at compile time)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from taut_kernels.rowwise.chunk_jit import (
    load_rows,
    load_sum,
    rows_of_program,
    start_early,
    store_chunk,
)
from taut_kernels.rowwise.packed_jit import larger_magnitude, product, wide
from taut_kernels.rowwise.row_quant import quantize, row_scale


@triton.jit
def load_weight(weight_ptr, offs, START: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr):
    """Load [BLOCK] weights, which every program reads: they stay in cache."""
    offs_n = START + offs
    if START + BLOCK > N:
        weight = tl.load(
            weight_ptr + offs_n, mask=offs_n < N, other=0.0, eviction_policy="evict_last"
        )
    else:
        weight = tl.load(weight_ptr + offs_n, eviction_policy="evict_last")
    return weight


@triton.jit
def prefetch_weight(weight_ptr, N: tl.constexpr):
    """Ask for the weights to be brought into L2, before it is known that they are final.

    No value is read: a weight may itself come from a kernel that still runs, as that of vLLM's
    Gemma norm does, and is then read as it is behind the wait.
    """
    LINE: tl.constexpr = 128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = triton.next_power_of_2((N + LINE - 1) // LINE)
    offs = tl.minimum(tl.arange(0, LINES) * LINE, N - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2::evict_last [$1]; mov.b32 $0, 0;",
        "=r,l",
        [(weight_ptr + offs).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def scaled(x, rsqrt, weight, y_type: tl.constexpr):
    """Return x · rsqrt · weight as ``y_type``, rounded where the unfused op rounds."""
    y = x * rsqrt
    if weight is not None:
        y = product(y.to(weight.dtype), weight)
    return y.to(y_type)


@triton.jit(do_not_specialize=["M"])
def rms_norm_kernel(
    x_ptr,  # [M, N], columns next to each other
    residual_ptr,  # [M, N] or None; updated
    weight_ptr,  # [N] or None
    y_ptr,  # [M, N], contiguous
    scale_ptr,  # [M] fp32: written (fp8, int8); [1] read (static_fp8); None (same)
    M,
    stride_xm,
    stride_rm,
    epsilon,
    N: tl.constexpr,
    OUT: tl.constexpr,  # same, fp8, int8, static_fp8
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # Behind the wait lies every read and every store, of the residual too.
        gdc_launch_dependents()
        if weight_ptr is not None:
            prefetch_weight(weight_ptr, N)
        gdc_wait()
    CHUNKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    HAS_WEIGHT: tl.constexpr = weight_ptr is not None
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
        residuals = load_rows(residual_rows, offs, mask_m, CHUNKS, BLOCK, N)
    if HAS_WEIGHT:
        for chunk in tl.static_range(CHUNKS):
            weights = weights + (load_weight(weight_ptr, offs, chunk * BLOCK, BLOCK, N),)

    squares = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    sums = ()
    for chunk in tl.static_range(CHUNKS):
        x = wide(xs[chunk])
        if HAS_RESIDUAL:
            x = x + wide(residuals[chunk])
            store_chunk(residual_rows, x, offs, mask_m, chunk * BLOCK, BLOCK, N)
        sums = sums + (x,)
        squares = tl.fma(x, x, squares)
    rsqrt = tl.rsqrt(tl.sum(squares, axis=1) / N + epsilon)

    largest = tl.zeros((ROWS, BLOCK), dtype=x_type)
    ys = ()
    for chunk in tl.static_range(CHUNKS):
        if HAS_WEIGHT:
            y = scaled(sums[chunk], rsqrt[:, None], weights[chunk][None, :], x_type)
        else:
            y = scaled(sums[chunk], rsqrt[:, None], None, x_type)
        ys = ys + (y,)
        if OUT == "fp8" or OUT == "int8":
            largest = larger_magnitude(largest, y)
    if OUT == "static_fp8":
        scale = tl.load(scale_ptr) + tl.zeros((ROWS,), dtype=tl.float32)
    elif OUT != "same":
        scale = row_scale(tl.max(largest, axis=1), OUT)
        tl.store(scale_ptr + offs_m, scale, mask=mask_m)
    if OUT != "same":
        reciprocal = tl.div_rn(1.0, scale)
    for chunk in tl.static_range(CHUNKS):
        y = ys[chunk]
        if OUT != "same":
            y = quantize(y, scale[:, None], reciprocal[:, None], OUT)
        store_chunk(y_rows, y, offs, mask_m, chunk * BLOCK, BLOCK, N)


@triton.jit
def _long_scaled(x, rsqrt, weight_ptr, offs_n, N: tl.constexpr, y_type: tl.constexpr):
    """As :func:`scaled`, with the weight still in memory."""
    weight = None
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + offs_n, mask=offs_n < N, other=0.0)
    return scaled(x, rsqrt, weight, y_type)


@triton.jit(do_not_specialize=["M"])
def rms_norm_long_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    scale_ptr,
    M,
    stride_xm,
    stride_rm,
    epsilon,
    N: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,  # 1
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Arguments as :func:`rms_norm_kernel`; a row is read again from L2 for every pass."""
    start_early(PDL)
    tl.static_assert(ROWS == 1)
    x_type: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x_row = x_ptr + row * stride_xm
    residual_row = residual_ptr
    if residual_ptr is not None:
        residual_row = residual_ptr + row * stride_rm
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, N, BLOCK):
        x = load_sum(x_row, residual_row, start + offs, N)
        squares = tl.fma(x, x, squares)
    rsqrt = tl.rsqrt(tl.sum(squares, axis=0) / N + epsilon)
    if OUT == "static_fp8":
        scale = tl.load(scale_ptr)
    elif OUT != "same":
        largest = tl.zeros((BLOCK,), dtype=x_type)
        for start in range(0, N, BLOCK):
            x = load_sum(x_row, residual_row, start + offs, N)
            y = _long_scaled(x, rsqrt, weight_ptr, start + offs, N, x_type)
            largest = larger_magnitude(largest, y)
        scale = row_scale(tl.max(largest, axis=0), OUT)
        tl.store(scale_ptr + row, scale)
    if OUT != "same":
        reciprocal = tl.div_rn(1.0, scale)
    for start in range(0, N, BLOCK):
        offs_n = start + offs
        x = load_sum(x_row, residual_row, offs_n, N)
        # Only in the last pass: the earlier ones need the residual as it came.
        if residual_ptr is not None:
            tl.store(residual_row + offs_n, x.to(x_type), mask=offs_n < N)
        y = _long_scaled(x, rsqrt, weight_ptr, offs_n, N, x_type)
        if OUT != "same":
            y = quantize(y, scale, reciprocal, OUT)
        tl.store(y_ptr + row * N + offs_n, y.to(y_ptr.dtype.element_ty), mask=offs_n < N)
