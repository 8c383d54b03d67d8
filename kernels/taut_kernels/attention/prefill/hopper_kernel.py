"""The Gluon kernel of :mod:`.hopper`: FlashAttention of sm_90.

A program has twelve warps in three partitions. One warp asks TMA for queries, keys and values, by
blocks, as far ahead as the rings have room; two groups of four warps, 64 queries each, multiply
them with `wgmma`. What plain Triton cannot write are the waits (arXiv:2407.08608, section 3.2):
a group issues the scores of a block and, behind them, the product of the weights of the block
before with its values, waits for the first only, and makes weights of them while the second runs.
The groups know nothing of each other: one's softmax meets the other's products by itself (taking
turns by `bar.sync`, as FlashAttention-3 does, was measured slower).

Programs stay: each takes one tile of 128 queries after another, longest first, there and back again
over the programs, so that all have as much to do; loads of a tile start while the one before ends.
Blocks of keys go from the last one, the only masked ones, to the first.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from taut_kernels.attention.prefill.hopper_step_jit import hide, soften, step, store
from taut_kernels.attention.prefill.tile_jit import SIZES, clear_rows, query_tile
from taut_kernels.hopper import barriers, load_block


@gluon.jit
def _first_block(
    q, rings, full, empty, at, count, position, count_k, scale_log2, PACKED: gl.constexpr,
    CAUSAL: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Return weights, maxima and sums of the last of ``count`` blocks, with which a tile begins."""
    slot, phase = at % STAGES, (at // STAGES) & 1
    zeros = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    mbarrier.wait(full[0].index(slot), phase)
    keys = rings[0].index(slot).permute([1, 0])
    scores = hopper.warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)
    scores = hopper.warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(empty[0].index(slot), count=1)
    scores = hide(scores, count - 1, position, count_k, CAUSAL, BLOCK_N, SCORES)
    row_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    weights, row_max, _ = soften(scores, row_max, scale_log2, True)
    if PACKED:
        rest = count_k - (count - 1) * BLOCK_N
        if rest < BLOCK_N:
            mbarrier.wait(full[1].index(slot), phase)
            clear_rows(rings[1].index(slot), rest, BLOCK_N, BLOCK_D)
    p = gl.convert_layout(weights.to(rings[1].dtype), gl.DotOperandLayout(0, SUMS, 2))
    return p, row_max, gl.sum(weights, 1)


@gluon.jit
def _attend(
    q, rings, q_full, q_empty, full, empty, o_ptr, lse_ptr, strides, sizes, cu, turns, scale_log2,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr, CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Run one of the two groups that multiply: 64 queries of every tile of the program."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    q = q.index(GROUP)
    at, done = 0, 0
    for turn in range(turns):
        batch, head, first_m, start_q, count_q, _start_k, count_k, count, whole = query_tile(
            turn, sizes, cu, CAUSAL, BLOCK_N
        )
        first_m += 64 * GROUP
        row_max = gl.full([64], float("-inf"), gl.float32, ROWS)
        row_sum = gl.zeros([64], gl.float32, ROWS)
        o = gl.zeros([64, BLOCK_D], gl.float32, SUMS)
        if count > 0:
            position = first_m + gl.arange(0, 64, ROWS) + (count_k - count_q)
            mbarrier.wait(q_full, done & 1)
            p, row_max, row_sum = _first_block(
                q, rings, full, empty, at, count, position, count_k, scale_log2, cu[1] is not None,
                CAUSAL, BLOCK_D, BLOCK_N, STAGES, SCORES, SUMS,
            )  # fmt: skip
            ahead = at + gl.minimum(1, count - 1)
            mbarrier.wait(full[0].index(ahead % STAGES), (ahead // STAGES) & 1)
            masked = count - gl.minimum(whole, count - 1)
            for i in range(1, masked):
                o, p, row_max, row_sum = step(
                    o, p, row_max, row_sum, q, rings, full, empty, at + i, count - 1 - i,
                    gl.minimum(1, count - 1 - i), position, count_k, scale_log2, CAUSAL, True,
                    BLOCK_N, STAGES, SCORES, SUMS,
                )  # fmt: skip
            for i in range(masked, count):
                o, p, row_max, row_sum = step(
                    o, p, row_max, row_sum, q, rings, full, empty, at + i, count - 1 - i,
                    gl.minimum(1, count - 1 - i), position, count_k, scale_log2, CAUSAL, False,
                    BLOCK_N, STAGES, SCORES, SUMS,
                )  # fmt: skip
            # The last scores have been waited for: the next tile's queries may come.
            mbarrier.arrive(q_empty, count=1)
            at += count
            end, phase = (at - 1) % STAGES, ((at - 1) // STAGES) & 1
            mbarrier.wait(full[1].index(end), phase)
            o = hopper.warpgroup_mma(p, rings[1].index(end), o, is_async=True)
            o, p = hopper.warpgroup_mma_wait(0, deps=[o, p])
            mbarrier.arrive(empty[1].index(end), count=1)
            done += 1
        if first_m < count_q:
            b, h = gl.cast(batch, gl.int64), gl.cast(head, gl.int64)
            o_rows = b * strides[0] + gl.cast(start_q, gl.int64) * strides[1] + h * strides[2]
            lse_row = b * strides[3] + h * strides[4] + start_q
            store(
                o, row_max, row_sum, o_ptr + o_rows, lse_ptr + lse_row, strides[1], first_m,
                count_q, D, BLOCK_D, SCORES, SUMS,
            )  # fmt: skip


@gluon.jit
def _ask(
    q_desc, k_desc, v_desc, q, rings, q_full, q_empty, full, empty, sizes, cu, turns,
    HEAD_GROUP: gl.constexpr, BLOCK_D: gl.constexpr, CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Run the warp that asks for blocks: queries of a tile, then keys and values in turn."""
    at, done = 0, 0
    for turn in range(turns):
        batch, head, first_m, start_q, _count_q, start_k, _count_k, count, _whole = query_tile(
            turn, sizes, cu, CAUSAL, BLOCK_N
        )
        if cu[0] is not None:
            batch = batch * 0
        if count > 0:
            mbarrier.wait(q_empty, (done & 1) ^ 1)
            mbarrier.expect(q_full, 128 * BLOCK_D * 2)
            for group in gl.static_range(2):
                place = q.index(group).reshape([1, 64, 1, BLOCK_D])
                first = start_q + first_m + 64 * group
                load_block(q_desc, [batch, first, head, 0], q_full, place)
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
def attention_hopper_kernel(
    o_ptr,  # as q, contiguous
    lse_ptr,  # [B, Hq, Tq] or [Hq, Σ Tq] fp32
    cu_q_ptr,  # [B + 1] int32, or None
    cu_k_ptr,
    q_desc,  # [B, Tq, Hq, D], or [1, Σ Tq, Hq, D] packed, in blocks of 64 tokens of a head
    k_desc,  # likewise, Hk heads, in blocks of BLOCK_N
    v_desc,
    length_q,  # tokens of each sequence where there is no cu
    length_k,
    heads,  # Hq
    blocks,  # of 128 queries, of the longest sequence
    sequences,
    turns,  # tiles a program at most
    stride_ob,
    stride_ot,
    stride_oh,
    stride_lb,
    stride_lh,
    scale_log2,  # scale · log₂ e
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
    k = gl.allocate_shared_memory(T, [STAGES, BLOCK_N, BLOCK_D], ROWS)
    v = gl.allocate_shared_memory(T, [STAGES, BLOCK_N, BLOCK_D], ROWS)
    q_full, q_empty = barriers(1, 1).index(0), barriers(1, 2).index(0)
    full, empty = (
        (barriers(STAGES, 1), barriers(STAGES, 1)),
        (barriers(STAGES, 2), barriers(STAGES, 2)),
    )
    hopper.fence_async_shared()
    rings, cu = (k, v), (cu_q_ptr, cu_k_ptr)
    sizes = (length_q, length_k, heads, blocks, sequences)
    strides = (stride_ob, stride_ot, stride_oh, stride_lb, stride_lh)
    # 2 · 232 + 40 registers for 128 threads each are a multiprocessor's.
    gl.warp_specialize(
        [
            (_attend, (q, rings, q_full, q_empty, full, empty, o_ptr, lse_ptr, strides, sizes, cu,
                       turns, scale_log2, 0, D, BLOCK_D, CAUSAL, BLOCK_N, STAGES)),
            (_attend, (q, rings, q_full, q_empty, full, empty, o_ptr, lse_ptr, strides, sizes, cu,
                       turns, scale_log2, 1, D, BLOCK_D, CAUSAL, BLOCK_N, STAGES)),
            (_ask, (q_desc, k_desc, v_desc, q, rings, q_full, q_empty, full, empty, sizes, cu,
                    turns, HEAD_GROUP, BLOCK_D, CAUSAL, BLOCK_N, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
