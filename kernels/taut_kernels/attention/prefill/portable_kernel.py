"""Jit functions of :mod:`.op`: the forward pass."""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_bounds(cu_ptr, length, batch):
    """Return first token (int64) and tokens of a sequence; packed ones are found by ``cu_ptr``."""
    if cu_ptr is not None:
        start = tl.load(cu_ptr + batch)
        count = tl.load(cu_ptr + batch + 1) - start
        start = start.to(tl.int64)
    else:
        start = batch * 0
        count = length
    return start, count


@triton.jit
def load_rows(
    rows_ptr, offs_t, offs_d, stride_t, count, D: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Load [BLOCK, BLOCK_D] of tokens ``offs_t``; 0 beyond ``count`` (if MASKED) and D."""
    pointers = rows_ptr + offs_t.to(tl.int64)[:, None] * stride_t + offs_d[None, :]
    if MASKED:
        if D == BLOCK_D:
            rows = tl.load(pointers, mask=offs_t[:, None] < count, other=0.0)
        else:
            mask = (offs_t[:, None] < count) & (offs_d[None, :] < D)
            rows = tl.load(pointers, mask=mask, other=0.0)
    elif D == BLOCK_D:
        rows = tl.load(pointers)
    else:
        rows = tl.load(pointers, mask=offs_d[None, :] < D, other=0.0)
    return rows


@triton.jit
def visible(position, key, count_k, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Say which of ``key`` the queries at these places see; the two broadcast to the result."""
    seen = key < count_k
    if CAUSAL:
        seen = seen & (key <= position)
    if WINDOW:
        seen = seen & (key > position - window)
    return seen


@triton.jit
def key_range(
    lowest, highest, count_k, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return first, masked, last: the keys that places lowest..highest see, in blocks of BLOCK_N.

    Every place sees all keys of the blocks first..masked.
    """
    last = count_k
    masked = (count_k // BLOCK_N) * BLOCK_N
    if CAUSAL:
        last = tl.minimum(last, tl.maximum(highest + 1, 0))
        masked = tl.minimum(masked, (tl.maximum(lowest + 1, 0) // BLOCK_N) * BLOCK_N)
    last = ((last + BLOCK_N - 1) // BLOCK_N) * BLOCK_N
    first = 0
    if WINDOW:
        # All of them are masked: a loop of its own for the inner blocks costs registers, and a
        # window has few.
        first = (tl.maximum(lowest - window + 1, 0) // BLOCK_N) * BLOCK_N
        masked = first
    return first, masked, last


@triton.jit
def add_keys(
    acc, row_max, row_sum, q, k_ptr, v_ptr, first, last, position, count_k, window, scale_log2,
    stride_kt, stride_vt, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the keys first..last, a multiple of BLOCK_N, into the running softmax."""
    offs_d = tl.arange(0, BLOCK_D)
    for step in tl.range(first, last, BLOCK_N):
        start = tl.multiple_of(step, BLOCK_N)
        offs_n = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, offs_n, offs_d, stride_kt, count_k, D, BLOCK_D, MASKED)
        scores = tl.dot(q, tl.trans(k))
        if MASKED:
            seen = visible(position[:, None], offs_n[None, :], count_k, window, CAUSAL, WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        # A row that has seen no key yet: ∞ − ∞ would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.exp2(scores * scale_log2 - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        v = load_rows(v_ptr, offs_n, offs_d, stride_vt, count_k, D, BLOCK_D, MASKED)
        acc = tl.dot(weights.to(v.dtype), v, acc)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["length_q", "length_k", "window", "stride_lb", "stride_lh"])
def attention_kernel(
    q_ptr,  # [B, Tq, Hq, D] or packed [Σ Tq, Hq, D]; D next to each other
    k_ptr,  # likewise, Hk heads
    v_ptr,
    o_ptr,  # as q
    lse_ptr,  # [B, Hq, Tq] or [Hq, Σ Tq] fp32: log Σ exp of the scaled scores
    cu_q_ptr,  # [B + 1] int32, or None
    cu_k_ptr,
    length_q,  # tokens of each sequence where there is no cu
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
    stride_ob,
    stride_ot,
    stride_oh,
    stride_lb,
    stride_lh,
    scale_log2,  # scale · log₂ e
    GROUP: tl.constexpr,  # query heads a key head
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # The last queries see the most keys: they start first, so that no long program ends the grid.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    start_q, count_q = sequence_bounds(cu_q_ptr, length_q, batch)
    start_k, count_k = sequence_bounds(cu_k_ptr, length_k, batch)
    first_m = block * BLOCK_M
    if first_m >= count_q:
        return
    head_k = (head // GROUP).to(tl.int64)
    q_ptr += batch * stride_qb + start_q * stride_qt + head.to(tl.int64) * stride_qh
    k_ptr += batch * stride_kb + start_k * stride_kt + head_k * stride_kh
    v_ptr += batch * stride_vb + start_k * stride_vt + head_k * stride_vh
    o_ptr += batch * stride_ob + start_q * stride_ot + head.to(tl.int64) * stride_oh
    lse_ptr += batch * stride_lb + head.to(tl.int64) * stride_lh + start_q

    offs_m = first_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_rows(q_ptr, offs_m, offs_d, stride_qt, count_q, D, BLOCK_D, True)
    # Where the query stands among the keys: the last query of a sequence sees its last key.
    shift = count_k - count_q
    position = offs_m + shift
    first, masked, last = key_range(
        first_m + shift, first_m + shift + BLOCK_M - 1, count_k, window, CAUSAL, WINDOW, BLOCK_N
    )
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if not WINDOW:
        acc, row_max, row_sum = add_keys(
            acc, row_max, row_sum, q, k_ptr, v_ptr, first, masked, position, count_k, window,
            scale_log2, stride_kt, stride_vt, D, BLOCK_D, BLOCK_N, CAUSAL, WINDOW, False,
        )  # fmt: skip
    acc, row_max, row_sum = add_keys(
        acc, row_max, row_sum, q, k_ptr, v_ptr, masked, last, position, count_k, window,
        scale_log2, stride_kt, stride_vt, D, BLOCK_D, BLOCK_N, CAUSAL, WINDOW, True,
    )  # fmt: skip

    saw_none = row_sum == 0.0
    out = acc / tl.where(saw_none, 1.0, row_sum)[:, None]
    lse = tl.where(saw_none, float("-inf"), (row_max + tl.log2(row_sum)) * 0.6931471805599453)
    tl.store(lse_ptr + offs_m, lse, mask=offs_m < count_q)
    o_rows = o_ptr + offs_m.to(tl.int64)[:, None] * stride_ot + offs_d[None, :]
    mask = (offs_m[:, None] < count_q) & (offs_d[None, :] < D)
    tl.store(o_rows, out.to(o_ptr.dtype.element_ty), mask=mask)
