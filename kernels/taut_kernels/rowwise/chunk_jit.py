"""Jit functions that move one step of a row-wise kernel: [ROWS, BLOCK], masked where needed."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from taut_kernels.rowwise.row_quant import quantize, row_scale


@triton.jit  # type: ignore[untyped-decorator]
def start_early(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel start, then wait for the one in front, where both start early."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def rows_of_program(M, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the places of a program's rows [ROWS], and which of them there are."""
    offs_m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return offs_m, offs_m < M


@triton.jit
def row_starts(ptr, offs_m, stride):  # type: ignore[no-untyped-def]
    """Return pointers to the starts of rows, [ROWS, 1]."""
    return ptr + offs_m.to(tl.int64)[:, None] * stride


@triton.jit  # type: ignore[untyped-decorator]
def load_chunk(row_ptrs, offs, mask_m, START: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load columns START.. as [ROWS, BLOCK]; what lies outside the tensor reads as 0."""
    ptrs = row_ptrs + (START + offs)[None, :]
    if START + BLOCK > N:
        chunk = tl.load(ptrs, mask=mask_m[:, None] & (START + offs < N)[None, :], other=0.0)
    elif row_ptrs.shape[0] > 1:
        chunk = tl.load(ptrs, mask=mask_m[:, None], other=0.0)
    else:
        # A single row always exists: no mask, so that the load is not predicated.
        chunk = tl.load(ptrs)
    return chunk


@triton.jit  # type: ignore[untyped-decorator]
def load_rows(  # type: ignore[no-untyped-def]
    row_ptrs, offs, mask_m, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr
):
    """Load whole rows in CHUNKS steps of [ROWS, BLOCK]; returns a tuple of them."""
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        chunks = chunks + (load_chunk(row_ptrs, offs, mask_m, chunk * BLOCK, BLOCK, N),)  # type: ignore[assignment]  # noqa: RUF005
    return chunks


@triton.jit  # type: ignore[untyped-decorator]
def load_sum(x_row, residual_row, offs_n, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load one block of x (+ residual) of a row too long for registers, as fp32 [BLOCK]."""
    x = tl.load(x_row + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    if residual_row is not None:
        x = x + tl.load(residual_row + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def store_chunk(  # type: ignore[no-untyped-def]
    row_ptrs, value, offs, mask_m, START: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr
):
    """Store what :func:`load_chunk` would load, in the type of the target."""
    ptrs = row_ptrs + (START + offs)[None, :]
    value = value.to(row_ptrs.dtype.element_ty)
    if START + BLOCK > N:
        tl.store(ptrs, value, mask=mask_m[:, None] & (START + offs < N)[None, :])
    elif row_ptrs.shape[0] > 1:
        tl.store(ptrs, value, mask=mask_m[:, None])
    else:
        tl.store(ptrs, value)


@triton.jit  # type: ignore[untyped-decorator]
def store_quantized(  # type: ignore[no-untyped-def]
    ys,  # CHUNKS steps of rows
    largest,  # magnitudes, [ROWS, BLOCK]
    y_rows,
    scale_ptr,
    offs_m,
    mask_m,
    offs,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    OUT: tl.constexpr,
):
    """Quantise rows, each by its own scale, and store both."""
    scale = row_scale(tl.max(largest, axis=1), OUT)
    tl.store(scale_ptr + offs_m, scale, mask=mask_m)
    reciprocal = tl.div_rn(1.0, scale)
    for chunk in tl.static_range(CHUNKS):
        q = quantize(ys[chunk], scale[:, None], reciprocal[:, None], OUT)
        store_chunk(y_rows, q, offs, mask_m, chunk * BLOCK, BLOCK, N)
