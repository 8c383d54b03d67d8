"""The Gluon kernel of the gradients of keys and values on sm_90.

Built as :mod:`.hopper_kernel`: one warp asks TMA for blocks, two groups
of four warps multiply, 64 keys each. Both keep their keys, values and sums over all queries of the
key head's group; scores are transposed, [keys, queries], so that weights and their gradients leave
a product in the order in which the next one reads them from registers.
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
    place_of,
    row_values,
    sequence_bounds,
    store_rows,
)
from taut_kernels.hopper import barriers, load_block


@gluon.jit
def _key_tile(turn, sizes, cu, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr):
    """Return a program's ``turn``-th tile.

    Returns batch, key head, first key, start and count of queries, start and count of keys, the
    first query that sees a key, and how many blocks of queries from there (0: none, or no tile).
    """
    length_q, length_k, heads_k, _blocks, sequences = sizes
    place, head, batch, inside = place_of(turn, sizes)
    # The first keys are seen by the most queries.
    first_n = place // (heads_k * sequences) * 128
    start_q, count_q = sequence_bounds(cu[0], length_q, batch)
    start_k, count_k = sequence_bounds(cu[1], length_k, batch)
    first_m = first_n * 0
    if CAUSAL:
        first_m = gl.maximum(first_n - (count_k - count_q), 0) // BLOCK_M * BLOCK_M
    count = gl.maximum(count_q - first_m + BLOCK_M - 1, 0) // BLOCK_M
    some = inside & (first_n < count_k)
    return (
        batch, head, first_n, start_q, count_q, start_k, count_k * gl.where(inside, 1, 0), first_m,
        gl.where(some, count, 0),
    )  # fmt: skip


@gluon.jit
def _step(
    dk, dv, k, v, rings, full, empty, at, start, count_q, lse, delta, key, scale_log2,
    PACKED: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Add what a block of queries, the rings' ``at``-th, gives the group's keys and values."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    slot, phase = at % STAGES, (at // STAGES) & 1
    q, do = rings[0].index(slot), rings[1].index(slot)
    zeros = gl.zeros([64, BLOCK_M], gl.float32, SCORES)
    mbarrier.wait(full[0].index(slot), phase)
    if PACKED:
        rest = count_q - start
        if rest < BLOCK_M:
            clear_rows(q, rest, BLOCK_M, BLOCK_D)
            mbarrier.wait(full[1].index(slot), phase)
            clear_rows(do, rest, BLOCK_M, BLOCK_D)
    scores = hopper.warpgroup_mma(k, q.permute([1, 0]), zeros, use_acc=False, is_async=True)
    mbarrier.wait(full[1].index(slot), phase)
    slopes = hopper.warpgroup_mma(v, do.permute([1, 0]), zeros, use_acc=False, is_async=True)
    lse = gl.convert_layout(lse, COLUMNS)
    scores = hopper.warpgroup_mma_wait(1, deps=[scores])
    weights = gl.exp2(scores * scale_log2 - gl.expand_dims(lse, 0))
    if CAUSAL:
        offs_m = gl.expand_dims(start + gl.arange(0, BLOCK_M, COLUMNS), 0)
        weights = gl.where(gl.expand_dims(key, 1) <= offs_m, weights, 0.0)
    p = gl.convert_layout(weights.to(q.dtype), LEFT)
    dv = hopper.warpgroup_mma(p, do, dv, is_async=True)
    slopes = hopper.warpgroup_mma_wait(1, deps=[slopes])
    ds = weights * (slopes - gl.expand_dims(gl.convert_layout(delta, COLUMNS), 0))
    ds = gl.convert_layout(ds.to(q.dtype), LEFT)
    dk = hopper.warpgroup_mma(ds, q, dk, is_async=True)
    dv, dk, p, ds = hopper.warpgroup_mma_wait(0, deps=[dv, dk, p, ds])
    mbarrier.arrive(empty[0].index(slot), count=1)
    mbarrier.arrive(empty[1].index(slot), count=1)
    return dk, dv


@gluon.jit
def _multiply(
    kv, rings, kv_full, kv_empty, full, empty, dk_ptr, dv_ptr, lse_ptr, delta_ptr, strides, sizes,
    cu, turns, scale, HEAD_GROUP: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    BLOCK_D: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Run one of the two groups that multiply: 64 keys of every tile of the program."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    # One value a thread: in the order of the scores' columns it would be 16, half of them spilled.
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    k, v = kv[0].index(GROUP), kv[1].index(GROUP)
    scale_log2 = scale * 1.4426950408889634
    at, done = 0, 0
    for turn in range(turns):
        batch, head, first_n, start_q, count_q, start_k, count_k, first_m, count = _key_tile(
            turn, sizes, cu, CAUSAL, BLOCK_M
        )
        first_n += 64 * GROUP
        dk = gl.zeros([64, BLOCK_D], gl.float32, SUMS)
        dv = gl.zeros([64, BLOCK_D], gl.float32, SUMS)
        b, h = gl.cast(batch, gl.int64), gl.cast(head, gl.int64)
        key = first_n + gl.arange(0, 64, gl.SliceLayout(1, SCORES)) - (count_k - count_q)
        if count > 0:
            mbarrier.wait(kv_full, done & 1)
            for member in range(HEAD_GROUP):
                row = b * strides[3] + (h * HEAD_GROUP + member) * strides[4] + start_q
                for i in range(count):
                    start = first_m + i * BLOCK_M
                    offs_m = start + gl.arange(0, BLOCK_M, LINE)
                    lse, delta = row_values(lse_ptr + row, delta_ptr + row, offs_m, count_q)
                    dk, dv = _step(
                        dk, dv, k, v, rings, full, empty, at, start, count_q, lse, delta, key,
                        scale_log2, cu[0] is not None, CAUSAL, BLOCK_D, BLOCK_M, STAGES, SCORES,
                        SUMS,
                    )  # fmt: skip
                    at += 1
            mbarrier.arrive(kv_empty, count=1)
            done += 1
        if first_n < count_k:
            to = b * strides[0] + gl.cast(start_k, gl.int64) * strides[1] + h * strides[2]
            store_rows(dk_ptr + to, dk * scale, strides[1], first_n, count_k, D, BLOCK_D)
            store_rows(dv_ptr + to, dv, strides[1], first_n, count_k, D, BLOCK_D)


@gluon.jit
def _ask(
    q_desc, k_desc, v_desc, do_desc, kv, rings, kv_full, kv_empty, full, empty, sizes, cu, turns,
    HEAD_GROUP: gl.constexpr, BLOCK_D: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Run the warp that asks for blocks: keys and values of a tile, then queries and gradients."""
    at, done = 0, 0
    for turn in range(turns):
        batch, head, first_n, start_q, _count_q, start_k, _count_k, first_m, count = _key_tile(
            turn, sizes, cu, CAUSAL, BLOCK_M
        )
        if cu[0] is not None:
            batch = batch * 0
        if count > 0:
            mbarrier.wait(kv_empty, (done & 1) ^ 1)
            mbarrier.expect(kv_full, 2 * 128 * BLOCK_D * 2)
            for group in gl.static_range(2):
                where = [batch, start_k + first_n + 64 * group, head, 0]
                load_block(k_desc, where, kv_full, kv[0].index(group).reshape([1, 64, 1, BLOCK_D]))
                load_block(v_desc, where, kv_full, kv[1].index(group).reshape([1, 64, 1, BLOCK_D]))
            done += 1
        for member in range(HEAD_GROUP):
            for i in range(count):
                slot, free = at % STAGES, ((at // STAGES) & 1) ^ 1
                where = [batch, start_q + first_m + i * BLOCK_M, head * HEAD_GROUP + member, 0]
                for which in gl.static_range(2):
                    mbarrier.wait(empty[which].index(slot), free)
                    mbarrier.expect(full[which].index(slot), BLOCK_M * BLOCK_D * 2)
                    place = rings[which].index(slot).reshape([1, BLOCK_M, 1, BLOCK_D])
                    load_block(do_desc if which else q_desc, where, full[which].index(slot), place)
                at += 1


@gluon.jit(do_not_specialize=SIZES)
def key_gradients_hopper_kernel(
    dk_ptr,  # as k, contiguous; written
    dv_ptr,
    lse_ptr,  # [B, Hq, Tq] or [Hq, Σ Tq] fp32
    delta_ptr,  # likewise: Σ o · do
    cu_q_ptr,  # [B + 1] int32, or None
    cu_k_ptr,
    q_desc,  # [B, Tq, Hq, D], or [1, Σ Tq, Hq, D] packed, in blocks of BLOCK_M tokens of a head
    k_desc,  # likewise, Hk heads, in blocks of 64
    v_desc,
    do_desc,  # as q_desc
    length_q,  # tokens of each sequence where there is no cu
    length_k,
    heads,  # Hk
    blocks,  # of 128 keys, of the longest sequence
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
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    T: gl.constexpr = k_desc.dtype
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k = gl.allocate_shared_memory(T, [2, 64, BLOCK_D], ROWS)
    v = gl.allocate_shared_memory(T, [2, 64, BLOCK_D], ROWS)
    q = gl.allocate_shared_memory(T, [STAGES, BLOCK_M, BLOCK_D], ROWS)
    do = gl.allocate_shared_memory(T, [STAGES, BLOCK_M, BLOCK_D], ROWS)
    kv_full, kv_empty = barriers(1, 1).index(0), barriers(1, 2).index(0)
    full = (barriers(STAGES, 1), barriers(STAGES, 1))
    empty = (barriers(STAGES, 2), barriers(STAGES, 2))
    hopper.fence_async_shared()
    kv, rings, cu = (k, v), (q, do), (cu_q_ptr, cu_k_ptr)
    sizes = (length_q, length_k, heads, blocks, sequences)
    strides = (stride_db, stride_dt, stride_dh, stride_lb, stride_lh)
    gl.warp_specialize(
        [
            (_multiply, (kv, rings, kv_full, kv_empty, full, empty, dk_ptr, dv_ptr, lse_ptr,
                         delta_ptr, strides, sizes, cu, turns, scale, HEAD_GROUP, 0, D, BLOCK_D,
                         CAUSAL, BLOCK_M, STAGES)),
            (_multiply, (kv, rings, kv_full, kv_empty, full, empty, dk_ptr, dv_ptr, lse_ptr,
                         delta_ptr, strides, sizes, cu, turns, scale, HEAD_GROUP, 1, D, BLOCK_D,
                         CAUSAL, BLOCK_M, STAGES)),
            (_ask, (q_desc, k_desc, v_desc, do_desc, kv, rings, kv_full, kv_empty, full, empty,
                    sizes, cu, turns, HEAD_GROUP, BLOCK_D, CAUSAL, BLOCK_M, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
