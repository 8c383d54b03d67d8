"""The Gluon kernel of FP8 products with 128 × 128 blocks of weights, for many tokens on sm_90.

As :mod:`.hopper_kernel`: a warp asks TMA for blocks of both operands, two
groups of four warps share a tile of 128 tokens, programs walk through tiles. Another warp asks for
scales, by `cp.async` beside the blocks: activations' as they lie, and a step's one of the weights.
Whoever waits for a stage has them, and nobody waits for a load. A group has two products on their
way: one is scaled while the other one multiplies. Where tiles are fewer than multiprocessors,
several programs share one along K. Of many tokens :mod:`.blocks_tall_kernel` is
faster.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from taut_kernels.gemm.scaled_mm.blocks_step_jit import (
    add,
    ask,
    ask_boxes,
    begin,
    give_back,
    has_room,
    landed,
)
from taut_kernels.gemm.scaled_mm.parts_jit import add_parts
from taut_kernels.gemm.scaled_mm.store_jit import store, with_bias
from taut_kernels.hopper import barrier_pairs, copy, first_token, place, seen_as


@gluon.jit
def _factors(ring, slot, GROUP: gl.constexpr, SUMS: gl.constexpr):
    """Read what scales a group's product: its tokens' scales times the weights' one."""
    TOKENS: gl.constexpr = gl.SliceLayout(1, SUMS)
    return ring[2].index(slot).slice(GROUP * 64, 64).load(TOKENS) * ring[5].index(slot).load(TOKENS)


@gluon.jit
def _sums(ring, at, steps, never, GROUP: gl.constexpr, SUMS: gl.constexpr):
    """Return a group's scaled sums over ``steps`` blocks of K, the first of them the ``at``-th.

    No product is on its way from one pair of steps to the next: ptxas copied it, and waited for
    that. Scales are read behind the products, for what is still to begin would wait for them.
    """
    COLUMNS: gl.constexpr = ring[1].shape[1]
    sums = gl.zeros([64, COLUMNS], gl.float32, SUMS)
    even = gl.zeros([64, COLUMNS], gl.float32, SUMS)
    odd = gl.zeros([64, COLUMNS], gl.float32, SUMS)
    for k in range(0, steps - 1, 2):
        slot = landed(ring, at + k)
        even = begin(ring, slot, even, never, GROUP)
        other = landed(ring, at + k + 1)
        odd = begin(ring, other, odd, never, GROUP)
        first, second = _factors(ring, slot, GROUP, SUMS), _factors(ring, other, GROUP, SUMS)
        even, first, second = hopper.warpgroup_mma_wait(1, deps=[even, first, second])
        give_back(ring, at + k)
        sums = add(sums, even, first, 1)
        odd = hopper.warpgroup_mma_wait(0, deps=[odd])
        give_back(ring, at + k + 1)
        sums = add(sums, odd, second, 0)
    if steps % 2 == 1:
        slot = landed(ring, at + steps - 1)
        even = begin(ring, slot, even, never, GROUP)
        first = _factors(ring, slot, GROUP, SUMS)
        even, first = hopper.warpgroup_mma_wait(0, deps=[even, first])
        give_back(ring, at + steps - 1)
        sums = add(sums, even, first, 0)
    return sums


@gluon.jit
def _share(item, tiles_m, tiles_n, steps, GROUP_M: gl.constexpr, SPLIT_K: gl.constexpr):
    """Return the tile of tokens and of features, the first step and the steps of a share of one."""
    pid_m, pid_n = place(item // SPLIT_K, tiles_m, tiles_n, GROUP_M)
    split = item % SPLIT_K
    first = steps * split // SPLIT_K
    return pid_m, pid_n, first, steps * (split + 1) // SPLIT_K - first


@gluon.jit
def _multiply(
    ring, out, pointers, sizes,
    GROUP: gl.constexpr, GROUP_M: gl.constexpr, SPLIT_K: gl.constexpr
):  # fmt: skip
    """Run a group that multiplies: its part of the tokens of every share of the program."""
    y, y_desc = out
    bias_ptr, partial_ptr, arrivals_ptr = pointers
    M, N, steps, tiles_m, tiles_n = sizes
    COLUMNS: gl.constexpr = ring[1].shape[1]
    PARTS: gl.constexpr = ring[0].shape[0] // ring[1].shape[0]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    at = 0
    for item in range(gl.program_id(0), tiles_m * tiles_n * SPLIT_K, gl.num_programs(0)):
        pid_m, pid_n, _, own = _share(item, tiles_m, tiles_n, steps, GROUP_M, SPLIT_K)
        first_m, first_n = first_token(pid_m * PARTS + GROUP, M, 64), pid_n * COLUMNS
        sums = _sums(ring, at, own, steps < 0, GROUP, SUMS)
        at += own
        finished = True
        if SPLIT_K > 1:
            part = item // SPLIT_K * PARTS + GROUP
            sums, finished = add_parts(
                sums, partial_ptr, arrivals_ptr, part, item % SPLIT_K, COLUMNS, SPLIT_K, SUMS
            )
        if finished:
            values = with_bias(sums, bias_ptr, first_n, N, COLUMNS, SUMS).to(y.dtype)
            store(y_desc, y, values, first_m, first_n, 64, COLUMNS, GROUP, 0, PARTS)
    tma.store_wait(0)


@gluon.jit
def _ask(x_desc, w_desc, ring, sizes, GROUP_M: gl.constexpr, SPLIT_K: gl.constexpr):
    """Run the warp that asks for blocks of both operands."""
    M, _, steps, tiles_m, tiles_n = sizes
    at = 0
    for item in range(gl.program_id(0), tiles_m * tiles_n * SPLIT_K, gl.num_programs(0)):
        pid_m, pid_n, first, own = _share(item, tiles_m, tiles_n, steps, GROUP_M, SPLIT_K)
        for k in range(first, first + own):
            if ring[6] is None:
                ask(x_desc, w_desc, ring, pid_m, pid_n, at, k, M)
            else:
                ask_boxes(x_desc, w_desc, ring, pid_m, pid_n, at, k, M)
            at += 1


@gluon.jit
def _ask_scales(ring, scales, strides, sizes, GROUP_M: gl.constexpr, SPLIT_K: gl.constexpr):
    """Run the warp that asks for scales of both operands."""
    x_scale_ptr, w_scale_ptr = scales
    stride_xsm, stride_xsk, stride_wsn = strides
    M, _, steps, tiles_m, tiles_n = sizes
    COLUMNS: gl.constexpr = ring[1].shape[1]
    PARTS: gl.constexpr = ring[0].shape[0] // ring[1].shape[0]
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    row = gl.arange(0, PARTS * 64, LINE)
    at = 0
    for item in range(gl.program_id(0), tiles_m * tiles_n * SPLIT_K, gl.num_programs(0)):
        pid_m, pid_n, first, own = _share(item, tiles_m, tiles_n, steps, GROUP_M, SPLIT_K)
        # Tokens beyond M are never stored: no mask. A tile's features are of one block of weights.
        token = first_token(pid_m * PARTS + row // 64, M, 64) + row % 64
        x_scales = x_scale_ptr + gl.minimum(token, M - 1).to(gl.int64) * stride_xsm
        block = pid_n * COLUMNS // 128
        w_scales = w_scale_ptr + (block * stride_wsn + gl.arange(0, 1, LINE))
        for k in range(first, first + own):
            slot = has_room(ring, at)
            copy(ring[2].index(slot), x_scales + k * stride_xsk)
            copy(ring[5].index(slot), w_scales + k)
            # Each lane arrives once its copies are there.
            async_copy.mbarrier_arrive(ring[3].index(slot), increment_count=False)
            at += 1


@gluon.jit(
    do_not_specialize=[
        "M", "N", "steps", "tiles_m", "tiles_n", "stride_xsm", "stride_xsk", "stride_wsn",
    ]
)  # fmt: skip
def fp8_block_hopper_kernel(
    x_scale_ptr,  # [M, ceil(K/128)] fp32, any strides
    w_scale_ptr,  # [ceil(N/128), ceil(K/128)] fp32, contiguous along K
    bias_ptr,  # [N], or None
    partial_ptr,  # [tiles, 2, SPLIT_K, 64 * COLUMNS] fp32; both None unsplit
    arrivals_ptr,  # [tiles * 2] int32, 0 before and after
    x_desc,  # [M, K] e4m3 in blocks [64, 128], or smaller ones where a tile has 64 tokens
    w_desc,  # [N, K] e4m3 in blocks [COLUMNS, 128]
    y_desc,  # [M, N] in blocks [64, 32]
    M,
    N,
    steps,  # blocks of K
    tiles_m,
    tiles_n,
    stride_xsm,
    stride_xsk,
    stride_wsn,
    TOKENS: gl.constexpr,  # of a tile: 64, for one group, or 128
    COLUMNS: gl.constexpr,  # 32, 64 or 128
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    SPLIT_K: gl.constexpr,
):
    PLACES: gl.constexpr = 1 if COLUMNS == 32 else 2
    PARTS: gl.constexpr = TOKENS // 64
    BOX: gl.constexpr = x_desc.block_shape[0]
    BYTES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    RESULTS: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    boxes = gl.allocate_shared_memory(x_desc.dtype, [STAGES * (TOKENS // BOX), BOX, 128], BYTES)
    a = seen_as(boxes, x_desc.dtype, [STAGES * PARTS, 64, 128], BYTES)
    b = gl.allocate_shared_memory(x_desc.dtype, [STAGES, COLUMNS, 128], BYTES)
    x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS], LINE)
    w_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1], LINE)
    y = gl.allocate_shared_memory(y_desc.dtype, [PARTS * PLACES, 64, 32], RESULTS)
    # Blocks arrive as one, scales by 32 lanes; all groups give them back.
    full, empty = barrier_pairs(STAGES, 33, PARTS)
    hopper.fence_async_shared()
    ring, out = (a, b, x_scales, full, empty, w_scales, boxes if PARTS == 1 else None), (y, y_desc)
    pointers, sizes = (bias_ptr, partial_ptr, arrivals_ptr), (M, N, steps, tiles_m, tiles_n)
    scales, strides = (x_scale_ptr, w_scale_ptr), (stride_xsm, stride_xsk, stride_wsn)
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_multiply, (ring, out, pointers, sizes, 0, GROUP_M, SPLIT_K)),
                (_ask, (x_desc, w_desc, ring, sizes, GROUP_M, SPLIT_K)),
                (_ask_scales, (ring, scales, strides, sizes, GROUP_M, SPLIT_K)),
            ],
            [1, 1],
            [40, 40],
        )
    else:
        # 2 · 216 + 72 registers for 128 threads each are a multiprocessor's.
        gl.warp_specialize(
            [
                (_multiply, (ring, out, pointers, sizes, 0, GROUP_M, SPLIT_K)),
                (_multiply, (ring, out, pointers, sizes, 1, GROUP_M, SPLIT_K)),
                (_ask, (x_desc, w_desc, ring, sizes, GROUP_M, SPLIT_K)),
                (_ask_scales, (ring, scales, strides, sizes, GROUP_M, SPLIT_K)),
            ],
            [4, 1, 1],
            [216, 72, 72],
        )
