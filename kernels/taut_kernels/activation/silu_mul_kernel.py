"""Jit functions of :mod:`.silu_mul`."""

# ruff: noqa: RUF005 (Triton's front end adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.rowwise.chunk_jit import (
    load_chunk,
    row_starts,
    rows_of_program,
    start_early,
    store_chunk,
    store_quantized,
)
from taut_kernels.rowwise.packed_jit import exp_or_zero, larger_magnitude, product, wide
from taut_kernels.rowwise.row_quant import quantize, row_scale


@triton.jit
def load_gate_up(
    x_rows, offs, mask_m, START: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Load gates and ups of columns START.. of the output, each [ROWS, BLOCK]."""
    if INTERLEAVED:
        pair_offs = tl.arange(0, 2 * BLOCK)
        pairs = load_chunk(x_rows, pair_offs, mask_m, 2 * START, 2 * BLOCK, 2 * N)
        gate, up = tl.split(tl.reshape(pairs, (x_rows.shape[0], BLOCK, 2)))
    else:
        gate = load_chunk(x_rows, offs, mask_m, START, BLOCK, N)
        up = load_chunk(x_rows + N, offs, mask_m, START, BLOCK, N)
    return gate, up


@triton.jit
def load_masked(
    x_rows, start, mask_m, N: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """As :func:`load_gate_up` from a column known at run time; columns beyond N read as 0."""
    if INTERLEAVED:
        offs = 2 * start + tl.arange(0, 2 * BLOCK)
        mask = mask_m[:, None] & (offs < 2 * N)[None, :]
        pairs = tl.load(x_rows + offs[None, :], mask=mask, other=0.0)
        gate, up = tl.split(tl.reshape(pairs, (x_rows.shape[0], BLOCK, 2)))
    else:
        offs = start + tl.arange(0, BLOCK)
        mask = mask_m[:, None] & (offs < N)[None, :]
        gate = tl.load(x_rows + offs[None, :], mask=mask, other=0.0)
        up = tl.load(x_rows + N + offs[None, :], mask=mask, other=0.0)
    return gate, up


@triton.jit
def store_masked(y_rows, y, start, mask_m, N: tl.constexpr, BLOCK: tl.constexpr):
    """Store [ROWS, BLOCK] from a column known at run time, in the type of the target."""
    offs = start + tl.arange(0, BLOCK)
    mask = mask_m[:, None] & (offs < N)[None, :]
    tl.store(y_rows + offs[None, :], y.to(y_rows.dtype.element_ty), mask=mask)


@triton.jit
def gated(gate, up, alpha, beta, limit, FORM: tl.constexpr):
    """Return the activation, of the inputs' type, rounded where the unfused op rounds."""
    x_type: tl.constexpr = gate.dtype
    gate = wide(gate)
    # σ(z) = rsqrt(1 + exp(-z))²: two operations less than the 10 of an approximate division, and
    # the quantised forms are bound by operations. What exp loses below 2**-126 the sum has not.
    if FORM == "silu":
        root = tl.rsqrt(1.0 + exp_or_zero(-gate))
        silu = gate * (root * root)
        y = product(silu.to(x_type), up)
    else:
        up = wide(up)
        if FORM == "clamped":
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
        root = tl.rsqrt(1.0 + exp_or_zero(-gate * alpha))
        y = gate * (root * root) * (up + beta)
    return y.to(x_type)


@triton.jit(do_not_specialize=["M"])
def silu_mul_kernel(
    x_ptr,  # [M, 2 * N], columns next to each other
    y_ptr,  # [M, N], contiguous
    scale_ptr,  # [1] fp32 (static_fp8) or None (same)
    M,
    stride_xm,
    alpha,
    beta,
    limit,
    N: tl.constexpr,
    OUT: tl.constexpr,  # same, static_fp8
    FORM: tl.constexpr,  # silu, clamped, free (alpha and beta without a limit)
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Pointwise: one program for a block of columns."""
    start_early(PDL)
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    offs_m = pid // BLOCKS * ROWS + tl.arange(0, ROWS)
    mask_m = offs_m < M
    start = pid % BLOCKS * BLOCK
    offs = tl.arange(0, BLOCK)
    EVEN: tl.constexpr = N % BLOCK == 0
    x_rows, y_rows = row_starts(x_ptr, offs_m, stride_xm), row_starts(y_ptr, offs_m, N)
    if EVEN:
        x_start = 2 * start if INTERLEAVED else start
        gate, up = load_gate_up(x_rows + x_start, offs, mask_m, 0, BLOCK, N, INTERLEAVED)
    else:
        gate, up = load_masked(x_rows, start, mask_m, N, BLOCK, INTERLEAVED)
    y = gated(gate, up, alpha, beta, limit, FORM)
    if OUT == "static_fp8":
        scale = tl.load(scale_ptr)
        y = quantize(y, scale, tl.div_rn(1.0, scale), OUT)
    if EVEN:
        store_chunk(y_rows + start, y, offs, mask_m, 0, BLOCK, N)
    else:
        store_masked(y_rows, y, start, mask_m, N, BLOCK)


@triton.jit(do_not_specialize=["M"])
def silu_mul_quant_kernel(
    x_ptr,
    y_ptr,
    scale_ptr,  # [M] fp32, written
    M,
    stride_xm,
    alpha,
    beta,
    limit,
    N: tl.constexpr,
    OUT: tl.constexpr,  # fp8, int8
    FORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Arguments as :func:`silu_mul_kernel`; whole rows a program, held in registers."""
    start_early(PDL)
    CHUNKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    offs_m, mask_m = rows_of_program(M, ROWS)
    offs = tl.arange(0, BLOCK)
    x_rows, y_rows = row_starts(x_ptr, offs_m, stride_xm), row_starts(y_ptr, offs_m, N)
    gates = ()
    ups = ()
    for chunk in tl.static_range(CHUNKS):
        gate, up = load_gate_up(x_rows, offs, mask_m, chunk * BLOCK, BLOCK, N, INTERLEAVED)
        gates = gates + (gate,)
        ups = ups + (up,)
    largest = tl.zeros((ROWS, BLOCK), dtype=x_ptr.dtype.element_ty)
    ys = ()
    for chunk in tl.static_range(CHUNKS):
        y = gated(gates[chunk], ups[chunk], alpha, beta, limit, FORM)
        largest = larger_magnitude(largest, y)
        ys = ys + (y,)
    store_quantized(ys, largest, y_rows, scale_ptr, offs_m, mask_m, offs, CHUNKS, BLOCK, N, OUT)


@triton.jit(do_not_specialize=["M"])
def silu_mul_quant_long_kernel(
    x_ptr, y_ptr, scale_ptr, M, stride_xm, alpha, beta, limit, N: tl.constexpr, OUT: tl.constexpr,
    FORM: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Arguments as :func:`silu_mul_quant_kernel`; a row is read a second time from L2."""
    start_early(PDL)
    offs_m, mask_m = rows_of_program(M, ROWS)
    x_rows, y_rows = row_starts(x_ptr, offs_m, stride_xm), row_starts(y_ptr, offs_m, N)
    largest = tl.zeros((ROWS, BLOCK), dtype=x_ptr.dtype.element_ty)
    for start in range(0, N, BLOCK):
        gate, up = load_masked(x_rows, start, mask_m, N, BLOCK, INTERLEAVED)
        y = gated(gate, up, alpha, beta, limit, FORM)
        largest = larger_magnitude(largest, y)
    scale = row_scale(tl.max(largest, axis=1), OUT)
    tl.store(scale_ptr + offs_m, scale, mask=mask_m)
    reciprocal = tl.div_rn(1.0, scale)
    for start in range(0, N, BLOCK):
        gate, up = load_masked(x_rows, start, mask_m, N, BLOCK, INTERLEAVED)
        y = gated(gate, up, alpha, beta, limit, FORM)
        q = quantize(y, scale[:, None], reciprocal[:, None], OUT)
        store_masked(y_rows, q, start, mask_m, N, BLOCK)
