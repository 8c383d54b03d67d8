"""Jit functions of :mod:`.op`: the walk over a paged cache.

Each warp has its own keys of a tile, its own running softmax and its own sums: products are
batched over the warps (rank 3), so that the softmax needs no other warp; they are merged once, at
the end. Query heads that share a key head are the rows of the products.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from taut_kernels.attention.decode.merge_jit import (
    first_rows,
    leave_part,
    merged_splits,
    merged_warps,
    store_rows,
)
from taut_kernels.attention.decode.shares_jit import find_part, key_span
from taut_kernels.attention.decode.values_jit import halves


@triton.jit
def load_pages(table_ptr, start, last, KEYS: tl.constexpr, PAGE: tl.constexpr, WARPS: tl.constexpr):
    """Load the pages of a tile's keys, [WARPS, KEYS or 1] int64; 0 where no key is."""
    # One number a warp where all its keys are in one page.
    COUNT: tl.constexpr = 1 if KEYS <= PAGE else KEYS
    offs = tl.arange(0, WARPS)[:, None] * KEYS + tl.arange(0, COUNT)[None, :]
    key = start + offs
    return tl.load(table_ptr + key // PAGE, mask=key < last, other=0).to(tl.int64)


@triton.jit
def load_queries(q_ptr, offs_row, rows, stride_qt, stride_qh, QUERIES: tl.constexpr,
                 WARPS: tl.constexpr):  # fmt: skip
    """Load the rows' queries, [WARPS, M, BLOCK_D], the same for every warp; 0 beyond rows and D.

    Volatile: LLVM would move the load behind the branch on the context, which waits for memory.
    """
    offs_d = tl.arange(0, QUERIES.block_d)
    GROUP: tl.constexpr = QUERIES.group
    places = (offs_row // GROUP).to(tl.int64) * stride_qt + (offs_row % GROUP) * stride_qh
    pointers = q_ptr + places[:, None] + offs_d[None, :]
    mask = (offs_row < rows)[:, None] & (offs_d < QUERIES.dim)[None, :]
    pointers = pointers[None, :, :] + tl.zeros((WARPS, 1, 1), tl.int32)
    return tl.load(pointers, mask=mask[None, :, :], other=0.0, volatile=True)


@triton.jit
def fp16_rows(q):
    """Return [W, M, D] as fp16 and the power of two [M] by which each row was divided.

    bf16 has values that fp16 has not: each row's largest element is brought to 1..2. Rows are the
    same in all of W.
    """
    q = q.to(tl.float32)
    bits = tl.max(tl.max(tl.abs(q), 2), 0).to(tl.int32, bitcast=True) & 0x7F800000
    # Such that both the power and its inverse are normal numbers.
    bits = tl.minimum(tl.maximum(bits, 0x00800000), 0x7E800000)
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    return (q * inverse[None, :, None]).to(tl.float16), bits.to(tl.float32, bitcast=True)


@triton.jit
def load_tile(k_ptr, v_ptr, pages, step, last, offs_n, offs_d, stride_kp, stride_kt, stride_vp,
              stride_vt, LENGTH: tl.constexpr, WIDTH: tl.constexpr, CACHE: tl.constexpr,
              BLOCK_KEYS: tl.constexpr):  # fmt: skip
    """Load keys and values of a tile, [WARPS, KEYS, WIDTH]; 0 where no key is, and beyond LENGTH.

    Where in its page a row of the tile is does not change from tile to tile, or only by what the
    tile's place adds: 32 bits a row stay in registers, and its address is one addition.
    """
    inside = (step + offs_n)[:, :, None] < last
    if LENGTH != WIDTH:
        inside = inside & (offs_d < LENGTH)[None, None, :]
    slot = (offs_n % CACHE.page)[:, :, None]
    shift = step % CACHE.page if CACHE.page > BLOCK_KEYS else 0
    k_pages = pages * stride_kp + shift * stride_kt
    k_slots = slot * stride_kt + offs_d[None, None, :]
    if CACHE.same_strides:
        v_pages, v_slots = k_pages, k_slots
    else:
        v_pages = pages * stride_vp + shift * stride_vt
        v_slots = slot * stride_vt + offs_d[None, None, :]
    k = tl.load((k_ptr + k_pages)[:, :, None] + k_slots, mask=inside, other=0)
    v = tl.load((v_ptr + v_pages)[:, :, None] + v_slots, mask=inside, other=0)
    return k, v


@triton.jit
def scores_of(q, q_odd, k, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """Return q kᵀ [WARPS, M, KEYS], fp32."""
    keys = tl.permute(k, (0, 2, 1))
    if FORMAT == "16 bit":
        scores = tl.dot(q, keys)
    else:
        even, odd = halves(keys, FORMAT, ASM)
        scores = tl.dot(q_odd, odd, tl.dot(q, even))
    return scores


@triton.jit
def softmax_step(scores, key, position, last, window, kept, row_max, row_sum,
                 QUERIES: tl.constexpr, WINDOW: tl.constexpr):  # fmt: skip
    """Take a tile's scores, base 2, into the running softmax; return weights and decay, too.

    Rows that are not `kept` get constants: the compiler drops what leads to them.
    """
    seen = (key < last)[:, None, :]
    if QUERIES > 1:
        seen = seen & (key[:, None, :] <= position[None, :, None])
    if WINDOW:
        seen = seen & (key[:, None, :] > position[None, :, None] - window)
    scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 2))
    # A row that has seen no key yet: ∞ − ∞ would be NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.where(kept[None, :, None], tl.exp2(scores - shift[:, :, None]), 0.0)
    decay = tl.where(kept[None, :], tl.exp2(row_max - shift), 1.0)
    return weights, decay, new_max, row_sum * decay + tl.sum(weights, 2)


@triton.jit
def add_values(acc, acc_odd, weights, decay, v, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """Return the sums so far, decayed, plus the weighted values of a tile."""
    acc = acc * decay[:, :, None]
    if FORMAT == "16 bit":
        acc = tl.dot(weights.to(v.dtype), v, acc)
    else:
        even, odd = halves(v, FORMAT, ASM)
        weights = weights.to(tl.float16)
        acc = tl.dot(weights, even, acc)
        acc_odd = tl.dot(weights, odd, acc_odd * decay[:, :, None])
    return acc, acc_odd


@triton.jit
def _operands(q, factor, FORMAT: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
              WARPS: tl.constexpr):  # fmt: skip
    """Return the queries as products take them, and what scores are multiplied by.

    Of an 8-bit cache the queries of even and of odd elements, with each row's power of two taken
    out; else the same twice.
    """
    q_odd = q
    if FORMAT != "16 bit":
        q, power = fp16_rows(q)
        factor *= power
        q, q_odd = tl.split(tl.reshape(q, (WARPS, BLOCK_M, WIDTH, 2)))
    return q, q_odd, factor


@triton.jit
def _walk(
    q,
    factor,  # of the scores
    k_ptr,
    v_ptr,
    table_ptr,
    pages,  # of the first tile
    first,
    last,
    position,  # [M]: where each row's query stands
    window,
    stride_kp, stride_kt, stride_vp, stride_vt,
    FORMAT: tl.constexpr,
    ASM: tl.constexpr,
    CACHE: tl.constexpr,
    QUERIES: tl.constexpr,
    CUT: tl.constexpr,
):  # fmt: skip
    """Return each warp's sums of values over its keys of first..last-1, maxima and sums."""
    WARPS: tl.constexpr = CUT.warps
    KEYS: tl.constexpr = CUT.keys
    BLOCK_M: tl.constexpr = CUT.block_m
    BLOCK_KEYS: tl.constexpr = KEYS * WARPS
    # Words of two elements where they have 8 bits.
    WIDTH: tl.constexpr = QUERIES.block_d if FORMAT == "16 bit" else QUERIES.block_d // 2
    LENGTH: tl.constexpr = QUERIES.dim if FORMAT == "16 bit" else QUERIES.dim // 2
    q, q_odd, factor = _operands(q, factor, FORMAT, BLOCK_M, WIDTH, WARPS)
    acc = tl.zeros((WARPS, BLOCK_M, WIDTH), tl.float32)
    acc_odd = acc
    row_max = tl.full((WARPS, BLOCK_M), float("-inf"), tl.float32)
    row_sum = tl.zeros((WARPS, BLOCK_M), tl.float32)

    kept = tl.arange(0, BLOCK_M) < CUT.kept
    offs_d = tl.arange(0, WIDTH)
    offs_n = tl.arange(0, WARPS)[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
    for step in tl.range(first, last, BLOCK_KEYS):
        start = tl.multiple_of(step, BLOCK_KEYS)
        k, v = load_tile(
            k_ptr, v_ptr, pages, start, last, offs_n, offs_d, stride_kp, stride_kt, stride_vp,
            stride_vt, LENGTH, WIDTH, CACHE, BLOCK_KEYS,
        )  # fmt: skip
        # A step ahead: the rows' loads do not wait for their pages' numbers.
        pages = load_pages(table_ptr, start + BLOCK_KEYS, last, KEYS, CACHE.page, WARPS)
        scores = scores_of(q, q_odd, k, FORMAT, ASM) * factor[None, :, None]
        weights, decay, row_max, row_sum = softmax_step(
            scores, start + offs_n, position, last, window, kept, row_max, row_sum,
            QUERIES.tokens, QUERIES.windowed,
        )  # fmt: skip
        acc, acc_odd = add_values(acc, acc_odd, weights, decay, v, FORMAT, ASM)
    if FORMAT != "16 bit":
        acc = tl.interleave(acc, acc_odd)
    return acc, row_max, row_sum


@triton.jit
def _add_part(
    part, highest, total, partial_ptr, stats_ptr, arrivals_ptr, part_of, batch, head, split,
    active, v_scale, o_ptr, first_row, rows_end, stride_ot, stride_oh, QUERIES: tl.constexpr,
    CUT: tl.constexpr,
):  # fmt: skip
    """Leave a part for the program that finishes last, which merges all parts and stores."""
    D: tl.constexpr = QUERIES.dim
    BLOCK_D: tl.constexpr = QUERIES.block_d
    ROWS: tl.constexpr = CUT.rows
    first_part = part_of.to(tl.int64)
    partial_ptr += first_part * (ROWS * D)
    stats_ptr += first_part * (2 * ROWS)
    finished = leave_part(
        part, highest, total, partial_ptr + split * (ROWS * D), stats_ptr + split * (2 * ROWS),
        arrivals_ptr + batch * tl.num_programs(0) + head, active, D, BLOCK_D, ROWS, CUT.kept,
    )  # fmt: skip
    if finished:
        out, weight = merged_splits(
            partial_ptr, stats_ptr, active, D, BLOCK_D, ROWS, CUT.block_r, CUT.unroll
        )
        store_rows(out, weight, v_scale, o_ptr, first_row, rows_end, stride_ot, stride_oh,
                   D, BLOCK_D, QUERIES.group, CUT.block_r)  # fmt: skip


_COUNTS = ["splits", "min_keys", "most_keys", "window", "stride_table", "stride_ks", "stride_vs"]


@triton.jit(do_not_specialize=_COUNTS)
def paged_decode_kernel(
    q_ptr,  # [B, T, Hq, D]
    k_ptr,  # [pages, page size, Hk, D], or int16 words of two elements [.., D/2]
    v_ptr,
    table_ptr,  # [B, most pages] int32
    contexts_ptr,  # [B] int32: keys of each sequence, its T queries included
    k_scale_ptr,  # [Hk] or [1] fp32, or None for 1
    v_scale_ptr,
    o_ptr,  # [B, T, Hq, D]
    # fp32, None with one split: [B, Hk · row blocks, splits, ..], or with BLOCK_B
    # [Hk · row blocks, places, ..]
    partial_ptr,  # [.., rows, D]
    stats_ptr,  # [.., 2, rows]: maximum and sum
    arrivals_ptr,  # [B · Hk · row blocks] int32, 0 before and after
    splits,  # of a sequence, or with BLOCK_B the shares of all keys
    min_keys,  # of a split or share
    most_keys,  # a row of the table leads to
    window,
    stride_table,
    stride_ks, stride_vs,  # 1, or 0 for one scale
    stride_qb, stride_qt, stride_qh,
    stride_kp, stride_kt, stride_kh,
    stride_vp, stride_vt, stride_vh,
    stride_ob, stride_ot, stride_oh,
    scale_log2,  # scale · log₂ e
    FORMAT: tl.constexpr,  # "16 bit", "fp8" or "int8"
    ASM: tl.constexpr,
    CACHE: tl.constexpr,  # of :mod:`.cut`, as are the next two
    QUERIES: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK_B: tl.constexpr,  # 0: the grid says which part; else of B lengths, read to find it
    STARTS_NEXT: tl.constexpr,  # let the kernel behind start, which waits for this one inside
    EARLY: tl.constexpr,  # start before the kernel in front has ended, and wait for it here
):  # fmt: skip
    if STARTS_NEXT:
        gdc_launch_dependents()
    if EARLY:
        gdc_wait()
    BLOCK_KEYS: tl.constexpr = CUT.keys * CUT.warps
    BLOCK_M: tl.constexpr = CUT.block_m
    GROUP: tl.constexpr = QUERIES.group
    ROW_BLOCKS: tl.constexpr = (QUERIES.tokens * GROUP + CUT.rows - 1) // CUT.rows
    # Neighbouring programs read neighbouring heads of the same pages.
    head = tl.program_id(0)
    head_k = (head // ROW_BLOCKS).to(tl.int64)
    first_row = head % ROW_BLOCKS * CUT.rows
    rows_end = tl.minimum(first_row + CUT.rows, QUERIES.tokens * GROUP)
    offs_row = first_row + tl.arange(0, BLOCK_M)
    # All that does not depend on the context is asked for beside it, not behind it.
    if BLOCK_B:
        k_scale = tl.load(k_scale_ptr + head_k * stride_ks) if k_scale_ptr is not None else 1.0
        place = tl.program_id(1)
        batch, split, active, context, first, last = find_part(
            contexts_ptr, tl.num_programs(1) - splits, splits, min_keys, most_keys, window, place,
            QUERIES.tokens, QUERIES.windowed, BLOCK_KEYS, BLOCK_B,
        )  # fmt: skip
        if batch < 0:
            return
        batch = batch.to(tl.int64)
        q_ptr += batch * stride_qb + head_k * GROUP * stride_qh
        q = load_queries(q_ptr, offs_row, rows_end, stride_qt, stride_qh, QUERIES, CUT.warps)
        part_of = head * tl.num_programs(1) + place - split
    else:
        split, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
        q_ptr += batch * stride_qb + head_k * GROUP * stride_qh
        context = tl.load(contexts_ptr + batch, volatile=True)
        q = load_queries(q_ptr, offs_row, rows_end, stride_qt, stride_qh, QUERIES, CUT.warps)
        k_scale = tl.load(k_scale_ptr + head_k * stride_ks) if k_scale_ptr is not None else 1.0
        context = tl.minimum(tl.maximum(context, 0), most_keys)
        first, chunk, active = key_span(
            context, window, splits, min_keys, QUERIES.tokens, QUERIES.windowed, BLOCK_KEYS
        )
        if split >= active:
            return
        first += split * chunk
        last = tl.minimum(first + chunk, context)
        part_of = (batch * tl.num_programs(0) + head) * splits
    table_ptr += batch * stride_table
    # And the first pages before the queries are made ready.
    pages = load_pages(table_ptr, first, last, CUT.keys, CACHE.page, CUT.warps)
    o_ptr += batch * stride_ob + head_k * GROUP * stride_oh
    k_ptr += head_k * stride_kh
    v_ptr += head_k * stride_vh

    # The last query of a sequence stands at its last key.
    position = context - QUERIES.tokens + offs_row // GROUP
    factor = tl.full((BLOCK_M,), 1.0, tl.float32) * (scale_log2 * k_scale)
    acc, row_max, row_sum = _walk(
        q, factor, k_ptr, v_ptr, table_ptr, pages, first, last, position, window,
        stride_kp, stride_kt, stride_vp, stride_vt, FORMAT, ASM, CACHE, QUERIES, CUT,
    )  # fmt: skip
    v_scale = tl.load(v_scale_ptr + head_k * stride_vs) if v_scale_ptr is not None else 1.0
    part, highest, total = merged_warps(
        first_rows(acc, CUT.kept), first_rows(row_max, CUT.kept), first_rows(row_sum, CUT.kept),
        CUT.warps, CUT.kept, QUERIES.block_d,
    )  # fmt: skip
    if partial_ptr is not None and active > 1:
        _add_part(
            part, highest, total, partial_ptr, stats_ptr, arrivals_ptr, part_of, batch, head, split,
            active, v_scale, o_ptr, first_row, rows_end, stride_ot, stride_oh, QUERIES, CUT,
        )  # fmt: skip
    else:
        store_rows(part, total, v_scale, o_ptr, first_row, rows_end, stride_ot, stride_oh,
                   QUERIES.dim, QUERIES.block_d, GROUP, CUT.kept)  # fmt: skip
