"""Jit functions of :mod:`.swiglu`: pointwise, a block of columns a program."""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.activation.silu_mul_kernel import gated


@triton.jit
def _gradients(dy, gate, up, alpha, beta, limit, FORM: tl.constexpr):
    """Return the gradients of gate and up as fp32; a value its clamp changed has none."""
    dy = dy.to(tl.float32)
    gate = gate.to(tl.float32)
    up = up.to(tl.float32)
    factor = up
    kept = gate
    if FORM == "clamped":
        kept = tl.minimum(gate, limit)
        factor = tl.minimum(tl.maximum(up, -limit), limit)
    if FORM == "silu":
        sigmoid = tl.sigmoid(gate)
        slope = 1.0 - sigmoid
    else:
        factor = factor + beta
        sigmoid = tl.sigmoid(kept * alpha)
        slope = alpha * (1.0 - sigmoid)
    silu = kept * sigmoid
    d_gate = dy * factor * (sigmoid + silu * slope)
    d_up = dy * silu
    if FORM == "clamped":
        d_gate = tl.where(gate <= limit, d_gate, 0.0)
        d_up = tl.where(tl.abs(up) <= limit, d_up, 0.0)
    return d_gate, d_up


@triton.jit
def _offsets(M, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return a program's rows [ROWS, 1] int64, columns [1, BLOCK] and mask."""
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    offs_m = pid // BLOCKS * ROWS + tl.arange(0, ROWS)
    offs_n = pid % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    return offs_m.to(tl.int64)[:, None], offs_n[None, :], mask


@triton.jit(do_not_specialize=["M"])
def swiglu_kernel(
    gate_ptr,  # [M, N], columns next to each other
    up_ptr,  # [M, N], columns next to each other, or None: SiLU alone
    y_ptr,  # [M, N], contiguous
    M,
    stride_gm,
    stride_um,
    alpha,
    beta,
    limit,
    N: tl.constexpr,
    FORM: tl.constexpr,  # silu, clamped, free (alpha and beta without a limit)
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows, columns, mask = _offsets(M, N, ROWS, BLOCK)
    gate = tl.load(gate_ptr + rows * stride_gm + columns, mask=mask, other=0.0)
    if up_ptr is None:
        wide = gate.to(tl.float32)
        y = wide * tl.sigmoid(wide)
    else:
        up = tl.load(up_ptr + rows * stride_um + columns, mask=mask, other=0.0)
        y = gated(gate, up, alpha, beta, limit, FORM)
    tl.store(y_ptr + rows * N + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def swiglu_backward_kernel(
    dy_ptr,  # [M, N], columns next to each other
    gate_ptr,  # [M, N], columns next to each other; [M, 2 * N] gate and up in turn (INTERLEAVED)
    up_ptr,  # [M, N], columns next to each other; None: SiLU alone, or INTERLEAVED
    d_gate_ptr,  # as gate, written
    d_up_ptr,  # as up, written
    M,
    stride_dm,
    stride_gm,
    stride_um,
    stride_dgm,
    stride_dum,
    alpha,
    beta,
    limit,
    N: tl.constexpr,
    FORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows, columns, mask = _offsets(M, N, ROWS, BLOCK)
    dy = tl.load(dy_ptr + rows * stride_dm + columns, mask=mask, other=0.0)
    x_type: tl.constexpr = d_gate_ptr.dtype.element_ty
    if INTERLEAVED:
        rows, pair_columns, pair_mask = _offsets(M, 2 * N, ROWS, 2 * BLOCK)
        pairs = tl.load(gate_ptr + rows * stride_gm + pair_columns, mask=pair_mask, other=0.0)
        gate, up = tl.split(tl.reshape(pairs, (ROWS, BLOCK, 2)))
        d_gate, d_up = _gradients(dy, gate, up, alpha, beta, limit, FORM)
        d_pairs = tl.reshape(tl.join(d_gate.to(x_type), d_up.to(x_type)), (ROWS, 2 * BLOCK))
        tl.store(d_gate_ptr + rows * stride_dgm + pair_columns, d_pairs, mask=pair_mask)
    else:
        gate = tl.load(gate_ptr + rows * stride_gm + columns, mask=mask, other=0.0)
        if up_ptr is None:
            up = tl.full(gate.shape, 1.0, tl.float32)
            d_gate, _ = _gradients(dy, gate, up, alpha, beta, limit, "silu")
        else:
            up = tl.load(up_ptr + rows * stride_um + columns, mask=mask, other=0.0)
            d_gate, d_up = _gradients(dy, gate, up, alpha, beta, limit, FORM)
            tl.store(d_up_ptr + rows * stride_dum + columns, d_up.to(x_type), mask=mask)
        tl.store(d_gate_ptr + rows * stride_dgm + columns, d_gate.to(x_type), mask=mask)
