"""Jit functions of :mod:`.op`: the backward pass.

Two kernels, one over blocks of keys and one over blocks of queries, each recomputing the scores
(arXiv:2307.08691, §3.1.2, without its atomic additions): the same bits from run to run.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.attention.prefill.portable_kernel import (
    key_range,
    load_rows,
    sequence_bounds,
    visible,
)


@triton.jit(do_not_specialize=["length_q", "stride_lb", "stride_lh"])
def row_delta_kernel(
    o_ptr,  # as in attention_kernel
    do_ptr,
    delta_ptr,  # as lse; written: Σ o · do
    cu_q_ptr,
    length_q,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_lb,
    stride_lh,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    start, count = sequence_bounds(cu_q_ptr, length_q, batch)
    first_m = tl.program_id(0) * BLOCK_M
    if first_m >= count:
        return
    o_ptr += batch * stride_ob + start * stride_ot + head * stride_oh
    do_ptr += batch * stride_gb + start * stride_gt + head * stride_gh
    offs_m = first_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    o = load_rows(o_ptr, offs_m, offs_d, stride_ot, count, D, BLOCK_D, True).to(tl.float32)
    do = load_rows(do_ptr, offs_m, offs_d, stride_gt, count, D, BLOCK_D, True).to(tl.float32)
    deltas = delta_ptr + batch * stride_lb + head * stride_lh + start + offs_m
    tl.store(deltas, tl.sum(o * do, 1), mask=offs_m < count)


@triton.jit
def load_row_values(values_ptr, offs_m, count, beyond):
    """Load [BLOCK_M] of lse or delta, ``beyond`` for rows that are not there."""
    return tl.load(values_ptr + offs_m, mask=offs_m < count, other=beyond)


@triton.jit
def base2_lse(lse):
    """Return lse in base 2; +∞, so that every weight is 0, for a row that saw no key."""
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)


@triton.jit
def block_and_head(HEADS_FIRST: tl.constexpr):
    """Return a program's block and head; programs begin in the order of blocks, or of heads.

    Heads first, the blocks with the most work of all heads begin before any with less, so that no
    long program ends the grid; blocks first, programs beside each other read the same rows.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    if HEADS_FIRST:
        place = block + head * tl.num_programs(0)
        head = place % tl.num_programs(1)
        block = place // tl.num_programs(1)
    return block, head


@triton.jit
def query_range(
    lowest, highest, shift, count_q, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return (first, blocks) of the queries that see any of the keys lowest..highest."""
    first = 0
    last = count_q
    if CAUSAL:
        first = (tl.maximum(lowest - shift, 0) // BLOCK_M) * BLOCK_M
    if WINDOW:
        last = tl.minimum(last, tl.maximum(highest + window - shift, 0))
    return first, tl.maximum(last - first + BLOCK_M - 1, 0) // BLOCK_M


@triton.jit(do_not_specialize=["length_q", "length_k", "window", "stride_lb", "stride_lh"])
def key_gradients_kernel(
    q_ptr,  # operands as in attention_kernel
    k_ptr,
    v_ptr,
    do_ptr,  # as o
    dk_ptr,  # [B, Tk, Hk, D] or packed, contiguous; written
    dv_ptr,
    lse_ptr,
    delta_ptr,
    cu_q_ptr,
    cu_k_ptr,
    length_q,
    length_k,
    window,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_db,
    stride_dt,
    stride_dh,
    stride_lb,
    stride_lh,
    scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):
    block, head_k = block_and_head(HEADS_FIRST)
    head_k = head_k.to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    start_q, count_q = sequence_bounds(cu_q_ptr, length_q, batch)
    start_k, count_k = sequence_bounds(cu_k_ptr, length_k, batch)
    first_n = block * BLOCK_N
    if first_n >= count_k:
        return
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    k_ptr += batch * stride_kb + start_k * stride_kt + head_k * stride_kh
    v_ptr += batch * stride_vb + start_k * stride_vt + head_k * stride_vh
    k = load_rows(k_ptr, offs_n, offs_d, stride_kt, count_k, D, BLOCK_D, True)
    v = load_rows(v_ptr, offs_n, offs_d, stride_vt, count_k, D, BLOCK_D, True)
    shift = count_k - count_q
    first, blocks = query_range(
        first_n, first_n + BLOCK_N - 1, shift, count_q, window, CAUSAL, WINDOW, BLOCK_M
    )
    scale_log2 = scale * 1.4426950408889634
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    q_ptr += batch * stride_qb + start_q * stride_qt + head_k * GROUP * stride_qh
    do_ptr += batch * stride_gb + start_q * stride_gt + head_k * GROUP * stride_gh
    at_row = batch * stride_lb + head_k * GROUP * stride_lh + start_q
    lse_ptr += at_row
    delta_ptr += at_row
    # Heads and blocks of queries in one loop, always masked: a loop in a loop, or one for each kind
    # of block, keeps its accumulators twice and spills (README, "Measured facts").
    for step in tl.range(0, GROUP * blocks):
        member = step // blocks
        offs_m = first + (step - member * blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
        q_rows, do_rows = q_ptr + member * stride_qh, do_ptr + member * stride_gh
        lses, deltas = lse_ptr + member * stride_lh, delta_ptr + member * stride_lh
        q = load_rows(q_rows, offs_m, offs_d, stride_qt, count_q, D, BLOCK_D, True)
        do = load_rows(do_rows, offs_m, offs_d, stride_gt, count_q, D, BLOCK_D, True)
        lse = base2_lse(load_row_values(lses, offs_m, count_q, float("inf")))
        delta = load_row_values(deltas, offs_m, count_q, 0.0)
        weights = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :])
        if CAUSAL:
            position = (offs_m + shift)[None, :]
            seen = visible(position, offs_n[:, None], count_k, window, CAUSAL, WINDOW)
            weights = tl.where(seen, weights, 0.0)
        dv = tl.dot(weights.to(do.dtype), do, dv)
        d_scores = weights * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(d_scores.to(q.dtype), q, dk)
    at = batch * stride_db + start_k * stride_dt + head_k * stride_dh
    rows = at + offs_n.to(tl.int64)[:, None] * stride_dt + offs_d[None, :]
    mask = (offs_n[:, None] < count_k) & (offs_d[None, :] < D)
    tl.store(dk_ptr + rows, (dk * scale).to(dk_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_ptr + rows, dv.to(dv_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_key_gradients(
    dq, q, do, lse, delta, k_ptr, v_ptr, first, last, position, count_k, window, scale_log2,
    stride_kt, stride_vt, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what the keys first..last, a multiple of BLOCK_N, give the queries."""
    offs_d = tl.arange(0, BLOCK_D)
    for step in tl.range(first, last, BLOCK_N):
        start = tl.multiple_of(step, BLOCK_N)
        offs_n = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, offs_n, offs_d, stride_kt, count_k, D, BLOCK_D, MASKED)
        v = load_rows(v_ptr, offs_n, offs_d, stride_vt, count_k, D, BLOCK_D, MASKED)
        weights = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
        if MASKED:
            seen = visible(position[:, None], offs_n[None, :], count_k, window, CAUSAL, WINDOW)
            weights = tl.where(seen, weights, 0.0)
        d_scores = weights * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(d_scores.to(k.dtype), k, dq)
    return dq


@triton.jit(do_not_specialize=["length_q", "length_k", "window", "stride_lb", "stride_lh"])
def query_gradients_kernel(
    q_ptr,  # operands as in attention_kernel
    k_ptr,
    v_ptr,
    do_ptr,
    dq_ptr,  # as q, contiguous; written
    lse_ptr,
    delta_ptr,
    cu_q_ptr,
    cu_k_ptr,
    length_q,
    length_k,
    window,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_db,
    stride_dt,
    stride_dh,
    stride_lb,
    stride_lh,
    scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):
    block, head = block_and_head(HEADS_FIRST)
    block, head = tl.num_programs(0) - 1 - block, head.to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    start_q, count_q = sequence_bounds(cu_q_ptr, length_q, batch)
    start_k, count_k = sequence_bounds(cu_k_ptr, length_k, batch)
    first_m = block * BLOCK_M
    if first_m >= count_q:
        return
    head_k = head // GROUP
    q_ptr += batch * stride_qb + start_q * stride_qt + head * stride_qh
    k_ptr += batch * stride_kb + start_k * stride_kt + head_k * stride_kh
    v_ptr += batch * stride_vb + start_k * stride_vt + head_k * stride_vh
    do_ptr += batch * stride_gb + start_q * stride_gt + head * stride_gh
    at_row = batch * stride_lb + head * stride_lh + start_q

    offs_m = first_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_rows(q_ptr, offs_m, offs_d, stride_qt, count_q, D, BLOCK_D, True)
    do = load_rows(do_ptr, offs_m, offs_d, stride_gt, count_q, D, BLOCK_D, True)
    lse = base2_lse(load_row_values(lse_ptr + at_row, offs_m, count_q, float("inf")))
    delta = load_row_values(delta_ptr + at_row, offs_m, count_q, 0.0)
    shift = count_k - count_q
    position = offs_m + shift
    first, masked, last = key_range(
        first_m + shift, first_m + shift + BLOCK_M - 1, count_k, window, CAUSAL, WINDOW, BLOCK_N
    )
    scale_log2 = scale * 1.4426950408889634
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if not WINDOW:
        dq = add_key_gradients(
            dq, q, do, lse, delta, k_ptr, v_ptr, first, masked, position, count_k, window,
            scale_log2, stride_kt, stride_vt, D, BLOCK_D, BLOCK_N, CAUSAL, WINDOW, False,
        )  # fmt: skip
    dq = add_key_gradients(
        dq, q, do, lse, delta, k_ptr, v_ptr, masked, last, position, count_k, window,
        scale_log2, stride_kt, stride_vt, D, BLOCK_D, BLOCK_N, CAUSAL, WINDOW, True,
    )  # fmt: skip
    at = batch * stride_db + start_q * stride_dt + head * stride_dh
    rows = at + offs_m.to(tl.int64)[:, None] * stride_dt + offs_d[None, :]
    mask = (offs_m[:, None] < count_q) & (offs_d[None, :] < D)
    tl.store(dq_ptr + rows, (dq * scale).to(dq_ptr.dtype.element_ty), mask=mask)
