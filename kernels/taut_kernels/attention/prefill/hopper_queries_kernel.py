"""The Gluon kernel of the gradient of queries on sm_90.

Built as :mod:`.hopper_kernel`: tiles, partitions, rings and the order
of blocks are its own; the product that a step leaves running is that of the scores' gradients of
the block before with its keys, which therefore stay a step longer: three stages at least.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from taut_kernels.attention.prefill.tile_jit import (
    SIZES,
    clear_rows,
    query_tile,
    row_values,
    store_rows,
)
from taut_kernels.hopper import barriers, load_block


@gluon.jit
def _score_gradients(
    scores, slopes, n, position, lse, delta, count_k, scale_log2, CAUSAL: gl.constexpr,
    MASKED: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr,
    T: gl.constexpr,
):  # fmt: skip
    """Return the gradients of the scores of block ``n`` as the next product's register operand."""
    weights = gl.exp2(scores * scale_log2 - gl.expand_dims(lse, 1))
    ds = weights * (slopes - gl.expand_dims(delta, 1))
    if MASKED:
        key = n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        seen = gl.expand_dims(key < count_k, 0)
        if CAUSAL:
            seen = seen & (gl.expand_dims(key, 0) <= gl.expand_dims(position, 1))
        ds = gl.where(seen, ds, 0.0)
    return gl.convert_layout(ds.to(T), gl.DotOperandLayout(0, SUMS, 2))


@gluon.jit
def _first_block(
    q, do, rings, full, empty, at, n, position, lse, delta, count_k, scale_log2,
    PACKED: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Return the gradients of the scores of the last block ``n``, with which a tile begins."""
    slot, phase = at % STAGES, (at // STAGES) & 1
    k, v = rings[0].index(slot), rings[1].index(slot)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    mbarrier.wait(full[0].index(slot), phase)
    if PACKED:
        rest = count_k - n * BLOCK_N
        if rest < BLOCK_N:
            clear_rows(k, rest, BLOCK_N, BLOCK_D)
    scores = hopper.warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)
    mbarrier.wait(full[1].index(slot), phase)
    slopes = hopper.warpgroup_mma(do, v.permute([1, 0]), zeros, use_acc=False, is_async=True)
    scores, slopes = hopper.warpgroup_mma_wait(0, deps=[scores, slopes])
    mbarrier.arrive(empty[1].index(slot), count=1)
    return _score_gradients(
        scores, slopes, n, position, lse, delta, count_k, scale_log2, CAUSAL, True, BLOCK_N,
        SCORES, SUMS, rings[0].dtype,
    )  # fmt: skip


@gluon.jit
def _step(
    dq, ds, q, do, rings, full, empty, at, n, ahead, position, lse, delta, count_k, scale_log2,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Multiply block ``n``, the rings' ``at``-th, and the scores' gradients of the block before."""
    slot, before = at % STAGES, (at - 1) % STAGES
    k, v = rings[0].index(slot), rings[1].index(slot)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    scores = hopper.warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)
    mbarrier.wait(full[1].index(slot), (at // STAGES) & 1)
    slopes = hopper.warpgroup_mma(do, v.permute([1, 0]), zeros, use_acc=False, is_async=True)
    dq = hopper.warpgroup_mma(ds, rings[0].index(before), dq, is_async=True)
    scores, slopes = hopper.warpgroup_mma_wait(1, deps=[scores, slopes])
    mbarrier.arrive(empty[1].index(slot), count=1)
    next_ds = _score_gradients(
        scores, slopes, n, position, lse, delta, count_k, scale_log2, CAUSAL, MASKED, BLOCK_N,
        SCORES, SUMS, rings[0].dtype,
    )  # fmt: skip
    # As in the forward kernel, this loop keeps ptxas from waiting for the product first.
    mbarrier.wait(full[0].index((at + ahead) % STAGES), ((at + ahead) // STAGES) & 1)
    dq, ds, next_ds = hopper.warpgroup_mma_wait(0, deps=[dq, ds, next_ds])
    mbarrier.arrive(empty[0].index(before), count=1)
    return dq, next_ds


@gluon.jit
def _multiply(
    own, rings, own_full, own_empty, full, empty, dq_ptr, lse_ptr, delta_ptr, strides, sizes, cu,
    turns, scale, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr,
    CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Run one of the two groups that multiply: 64 queries of every tile of the program."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    q, do = own[0].index(GROUP), own[1].index(GROUP)
    scale_log2 = scale * 1.4426950408889634
    at, done = 0, 0
    for turn in range(turns):
        batch, head, first_m, start_q, count_q, _start_k, count_k, count, whole = query_tile(
            turn, sizes, cu, CAUSAL, BLOCK_N
        )
        first_m += 64 * GROUP
        b, h = gl.cast(batch, gl.int64), gl.cast(head, gl.int64)
        offs_m = first_m + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
        dq = gl.zeros([64, BLOCK_D], gl.float32, SUMS)
        if count > 0:
            row = b * strides[3] + h * strides[4] + start_q
            lse, delta = row_values(lse_ptr + row, delta_ptr + row, offs_m, count_q)
            position = offs_m + (count_k - count_q)
            mbarrier.wait(own_full, done & 1)
            ds = _first_block(
                q, do, rings, full, empty, at, count - 1, position, lse, delta, count_k,
                scale_log2, cu[1] is not None, CAUSAL, BLOCK_D, BLOCK_N, STAGES, SCORES, SUMS,
            )  # fmt: skip
            ahead = at + gl.minimum(1, count - 1)
            mbarrier.wait(full[0].index(ahead % STAGES), (ahead // STAGES) & 1)
            masked = count - gl.minimum(whole, count - 1)
            for i in range(1, masked):
                dq, ds = _step(
                    dq, ds, q, do, rings, full, empty, at + i, count - 1 - i,
                    gl.minimum(1, count - 1 - i), position, lse, delta, count_k, scale_log2,
                    CAUSAL, True, BLOCK_N, STAGES, SCORES, SUMS,
                )  # fmt: skip
            for i in range(masked, count):
                dq, ds = _step(
                    dq, ds, q, do, rings, full, empty, at + i, count - 1 - i,
                    gl.minimum(1, count - 1 - i), position, lse, delta, count_k, scale_log2,
                    CAUSAL, False, BLOCK_N, STAGES, SCORES, SUMS,
                )  # fmt: skip
            mbarrier.arrive(own_empty, count=1)
            at += count
            end = (at - 1) % STAGES
            dq = hopper.warpgroup_mma(ds, rings[0].index(end), dq, is_async=True)
            dq, ds = hopper.warpgroup_mma_wait(0, deps=[dq, ds])
            mbarrier.arrive(empty[0].index(end), count=1)
            done += 1
        if first_m < count_q:
            to = b * strides[0] + gl.cast(start_q, gl.int64) * strides[1] + h * strides[2]
            store_rows(dq_ptr + to, dq * scale, strides[1], first_m, count_q, D, BLOCK_D)


@gluon.jit
def _ask(
    q_desc, k_desc, v_desc, do_desc, own, rings, own_full, own_empty, full, empty, sizes, cu,
    turns, HEAD_GROUP: gl.constexpr, BLOCK_D: gl.constexpr, CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Run the warp that asks for blocks: queries and gradients of a tile, then keys and values."""
    at, done = 0, 0
    for turn in range(turns):
        batch, head, first_m, start_q, _count_q, start_k, _count_k, count, _whole = query_tile(
            turn, sizes, cu, CAUSAL, BLOCK_N
        )
        if cu[0] is not None:
            batch = batch * 0
        if count > 0:
            mbarrier.wait(own_empty, (done & 1) ^ 1)
            mbarrier.expect(own_full, 2 * 128 * BLOCK_D * 2)
            for group in gl.static_range(2):
                where = [batch, start_q + first_m + 64 * group, head, 0]
                place = own[0].index(group).reshape([1, 64, 1, BLOCK_D])
                load_block(q_desc, where, own_full, place)
                place = own[1].index(group).reshape([1, 64, 1, BLOCK_D])
                load_block(do_desc, where, own_full, place)
            done += 1
        for i in range(count):
            slot, free = at % STAGES, ((at // STAGES) & 1) ^ 1
            where = [batch, start_k + (count - 1 - i) * BLOCK_N, head // HEAD_GROUP, 0]
            for which in gl.static_range(2):
                mbarrier.wait(empty[which].index(slot), free)
                mbarrier.expect(full[which].index(slot), BLOCK_N * BLOCK_D * 2)
                place = rings[which].index(slot).reshape([1, BLOCK_N, 1, BLOCK_D])
                load_block(v_desc if which else k_desc, where, full[which].index(slot), place)
            at += 1


@gluon.jit(do_not_specialize=SIZES)
def query_gradients_hopper_kernel(
    dq_ptr,  # as q, contiguous; written
    lse_ptr,  # [B, Hq, Tq] or [Hq, Σ Tq] fp32
    delta_ptr,  # likewise: Σ o · do
    cu_q_ptr,  # [B + 1] int32, or None
    cu_k_ptr,
    q_desc,  # [B, Tq, Hq, D], or [1, Σ Tq, Hq, D] packed, in blocks of 64 tokens of a head
    k_desc,  # likewise, Hk heads, in blocks of BLOCK_N
    v_desc,
    do_desc,  # as q_desc
    length_q,  # tokens of each sequence where there is no cu
    length_k,
    heads,  # Hq
    blocks,  # of 128 queries, of the longest sequence
    sequences,
    turns,  # tiles a program at most
    stride_db,
    stride_dt,
    stride_dh,
    stride_lb,
    stride_lh,
    scale,
    HEAD_GROUP: gl.constexpr,  # query heads a key head
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,
    CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    T: gl.constexpr = k_desc.dtype
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q = gl.allocate_shared_memory(T, [2, 64, BLOCK_D], ROWS)
    do = gl.allocate_shared_memory(T, [2, 64, BLOCK_D], ROWS)
    k = gl.allocate_shared_memory(T, [STAGES, BLOCK_N, BLOCK_D], ROWS)
    v = gl.allocate_shared_memory(T, [STAGES, BLOCK_N, BLOCK_D], ROWS)
    own_full, own_empty = barriers(1, 1).index(0), barriers(1, 2).index(0)
    full = (barriers(STAGES, 1), barriers(STAGES, 1))
    empty = (barriers(STAGES, 2), barriers(STAGES, 2))
    hopper.fence_async_shared()
    own, rings, cu = (q, do), (k, v), (cu_q_ptr, cu_k_ptr)
    sizes = (length_q, length_k, heads, blocks, sequences)
    strides = (stride_db, stride_dt, stride_dh, stride_lb, stride_lh)
    gl.warp_specialize(
        [
            (_multiply, (own, rings, own_full, own_empty, full, empty, dq_ptr, lse_ptr, delta_ptr,
                         strides, sizes, cu, turns, scale, 0, D, BLOCK_D, CAUSAL, BLOCK_N,
                         STAGES)),
            (_multiply, (own, rings, own_full, own_empty, full, empty, dq_ptr, lse_ptr, delta_ptr,
                         strides, sizes, cu, turns, scale, 1, D, BLOCK_D, CAUSAL, BLOCK_N,
                         STAGES)),
            (_ask, (q_desc, k_desc, v_desc, do_desc, own, rings, own_full, own_empty, full, empty,
                    sizes, cu, turns, HEAD_GROUP, BLOCK_D, CAUSAL, BLOCK_N, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
