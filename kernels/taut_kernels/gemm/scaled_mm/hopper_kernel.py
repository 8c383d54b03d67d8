"""The Gluon kernel of the 8-bit products of many tokens on sm_90.

One warp of a program asks TMA for blocks of tokens and weights, 128 bytes of K deep, as far ahead
as a ring of shared memory has room; two groups of four warps multiply them with `wgmma`, 64 tokens
of a tile each by all its features. What plain Triton cannot write are the waits: a group issues the
products of a step and then waits for those of the step before, int8 as well as FP8.

Programs stay and walk through tiles in groups of GROUP_M token tiles, whose weights stay in L2; the
loads of a tile are under way while the one before is scaled and stored.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from taut_kernels.gemm.scaled_mm.store_jit import scaled, store, vectors
from taut_kernels.hopper import barrier_pairs, first_token, load_block, place


@gluon.jit
def _sums(
    a, b, full, empty, at, steps, GROUP: gl.constexpr, STAGES: gl.constexpr, SUMS: gl.constexpr
):
    """Return a group's sums over ``steps`` blocks of K, the first of which is the ``at``-th."""
    ACC: gl.constexpr = gl.int32 if a.dtype == gl.int8 else gl.float32
    COLUMNS: gl.constexpr = b.shape[1]
    acc = gl.zeros([64, COLUMNS], ACC, SUMS)
    for k in range(steps):
        slot = (at + k) % STAGES
        mbarrier.wait(full.index(slot), ((at + k) // STAGES) & 1)
        rows, columns = a.index(slot * 2 + GROUP), b.index(slot).permute([1, 0])
        acc = hopper.warpgroup_mma(rows, columns, acc, use_acc=k > 0, is_async=True)
        # Until the step before is done: its place may be filled again.
        acc = hopper.warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((at + k + STAGES - 1) % STAGES), count=1, pred=k > 0)
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((at + steps - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _two_sums(
    a, b, c, full, empty, at, steps,
    GROUP: gl.constexpr, STAGES: gl.constexpr, SUMS: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """Return as :func:`_sums` the sums of a tile's first columns, and those of the others."""
    ACC: gl.constexpr = gl.int32 if a.dtype == gl.int8 else gl.float32
    COLUMNS: gl.constexpr = b.shape[1]
    FURTHER: gl.constexpr = c.shape[1]
    acc = gl.zeros([64, COLUMNS], ACC, SUMS)
    more = gl.zeros([64, FURTHER], ACC, MORE)
    for k in range(steps):
        slot = (at + k) % STAGES
        mbarrier.wait(full.index(slot), ((at + k) // STAGES) & 1)
        rows, columns = a.index(slot * 2 + GROUP), b.index(slot).permute([1, 0])
        others = c.index(slot).permute([1, 0])
        acc = hopper.warpgroup_mma(rows, columns, acc, use_acc=k > 0, is_async=True)
        more = hopper.warpgroup_mma(rows, others, more, use_acc=k > 0, is_async=True)
        # Two products a step: those of the last step may be under way.
        acc, more = hopper.warpgroup_mma_wait(2, deps=[acc, more])
        mbarrier.arrive(empty.index((at + k + STAGES - 1) % STAGES), count=1, pred=k > 0)
    acc, more = hopper.warpgroup_mma_wait(0, deps=[acc, more])
    mbarrier.arrive(empty.index((at + steps - 1) % STAGES), count=1)
    return acc, more


@gluon.jit
def _multiply_both(
    shared, pointers, strides, sizes, GROUP: gl.constexpr, GROUP_M: gl.constexpr
):  # fmt: skip
    """Run a group as :func:`_multiply` does, whose tiles have a second part of columns."""
    a, b, full, empty, y, y_desc, c = shared
    M, N, steps, tiles_m, tiles_n = sizes
    COLUMNS: gl.constexpr = b.shape[1]
    FURTHER: gl.constexpr = c.shape[1]
    STAGES: gl.constexpr = b.shape[0]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    MORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FURTHER, 32])
    at = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = place(tile, tiles_m, tiles_n, GROUP_M)
        first_m, first_n = first_token(pid_m * 2 + GROUP, M, 64), pid_n * (COLUMNS + FURTHER)
        second_n = first_n + COLUMNS
        found = vectors(pointers, strides, first_m, first_n, M, N, 64, COLUMNS, SUMS)
        others = vectors(pointers, strides, first_m, second_n, M, N, 64, FURTHER, MORE)
        acc, more = _two_sums(a, b, c, full, empty, at, steps, GROUP, STAGES, SUMS, MORE)
        at += steps
        values = scaled(acc, pointers, found, SUMS).to(y.dtype)
        store(y_desc, y, values, first_m, first_n, 64, COLUMNS, GROUP)
        values = scaled(more, pointers, others, MORE).to(y.dtype)
        store(y_desc, y, values, first_m, second_n, 64, FURTHER, GROUP, 4)
    tma.store_wait(0)


@gluon.jit
def _multiply(
    shared, pointers, strides, sizes, GROUP: gl.constexpr, GROUP_M: gl.constexpr
):  # fmt: skip
    """Run a group that multiplies: 64 tokens of every tile of the program."""
    a, b, full, empty, y, y_desc, _ = shared
    M, N, steps, tiles_m, tiles_n = sizes
    COLUMNS: gl.constexpr = b.shape[1]
    STAGES: gl.constexpr = b.shape[0]
    # Triton 3.6 has no int8 product of 256 columns.
    WIDE: gl.constexpr = 128 if a.dtype == gl.int8 else COLUMNS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 32])
    at = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = place(tile, tiles_m, tiles_n, GROUP_M)
        first_m, first_n = first_token(pid_m * 2 + GROUP, M, 64), pid_n * COLUMNS
        # Asked for before the products, used behind them.
        found = vectors(pointers, strides, first_m, first_n, M, N, 64, COLUMNS, SUMS)
        acc = _sums(a, b, full, empty, at, steps, GROUP, STAGES, SUMS)
        at += steps
        values = scaled(acc, pointers, found, SUMS).to(y.dtype)
        store(y_desc, y, values, first_m, first_n, 64, COLUMNS, GROUP)
    tma.store_wait(0)


@gluon.jit
def _ask(
    x_desc, w_desc, more_desc, shared, sizes, GROUP_M: gl.constexpr, FURTHER: gl.constexpr
):  # fmt: skip
    """Run the warp that asks for blocks of both operands."""
    a, b, full, empty, _, _, c = shared
    M, _, steps, tiles_m, tiles_n = sizes
    STAGES: gl.constexpr = b.shape[0]
    COLUMNS: gl.constexpr = b.shape[1]
    WIDTH: gl.constexpr = COLUMNS + FURTHER
    at = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = place(tile, tiles_m, tiles_n, GROUP_M)
        for k in range(steps):
            slot = at % STAGES
            landed = full.index(slot)
            mbarrier.wait(empty.index(slot), ((at // STAGES) & 1) ^ 1)
            mbarrier.expect(landed, (128 + WIDTH) * 128)
            for group in gl.static_range(2):
                first = first_token(pid_m * 2 + group, M, 64)
                load_block(x_desc, [first, k * 128], landed, a.index(slot * 2 + group))
            load_block(w_desc, [pid_n * WIDTH, k * 128], landed, b.index(slot))
            if FURTHER:
                further = pid_n * WIDTH + COLUMNS
                load_block(more_desc, [further, k * 128], landed, c.index(slot))
            at += 1


@gluon.jit(
    do_not_specialize=["M", "N", "steps", "tiles_m", "tiles_n", "stride_xs", "stride_ws"]
)  # fmt: skip
def scaled_mm_hopper_kernel(
    x_scale_ptr,  # [M] or [1] fp32
    w_scale_ptr,  # [N] or [1] fp32
    azp_adj_ptr,  # [N] int32, or None
    azp_ptr,  # [M] int32, or None
    bias_ptr,  # [N], or None
    x_desc,  # [M, K] int8 or e4m3 in blocks [64, 128]
    w_desc,  # [N, K] as x in blocks [COLUMNS, 128]
    more_desc,  # the same in blocks [FURTHER, 128], or None
    y_desc,  # [M, N] in blocks [64, 64], or [64, 32] with FURTHER
    M,
    N,
    steps,  # blocks of K
    tiles_m,
    tiles_n,
    stride_xs,  # 1, or 0 for one scale
    stride_ws,
    COLUMNS: gl.constexpr,  # features of a tile, 128 or 256
    FURTHER: gl.constexpr,  # and as many more, 0, 32 or 64
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    BYTES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    PART: gl.constexpr = 32 if FURTHER else 64
    PLACES: gl.constexpr = 5 if FURTHER == 32 else (3 if FURTHER else 2)
    HALVES: gl.constexpr = gl.NVMMASharedLayout(2 * PART, 16, 2)
    a = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, 64, 128], BYTES)
    b = gl.allocate_shared_memory(x_desc.dtype, [STAGES, COLUMNS, 128], BYTES)
    y = gl.allocate_shared_memory(y_desc.dtype, [2 * PLACES, 64, PART], HALVES)
    full, empty = barrier_pairs(STAGES, 1, 2)
    hopper.fence_async_shared()
    pointers = (x_scale_ptr, w_scale_ptr, azp_adj_ptr, azp_ptr, bias_ptr)
    strides, sizes = (stride_xs, stride_ws), (M, N, steps, tiles_m, tiles_n)
    # 2 · 232 + 40 registers for 128 threads each are a multiprocessor's.
    if FURTHER:
        c = gl.allocate_shared_memory(x_desc.dtype, [STAGES, FURTHER, 128], BYTES)
        shared = (a, b, full, empty, y, y_desc, c)
        gl.warp_specialize(
            [
                (_multiply_both, (shared, pointers, strides, sizes, 0, GROUP_M)),
                (_multiply_both, (shared, pointers, strides, sizes, 1, GROUP_M)),
                (_ask, (x_desc, w_desc, more_desc, shared, sizes, GROUP_M, FURTHER)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        shared = (a, b, full, empty, y, y_desc, b)
        gl.warp_specialize(
            [
                (_multiply, (shared, pointers, strides, sizes, 0, GROUP_M)),
                (_multiply, (shared, pointers, strides, sizes, 1, GROUP_M)),
                (_ask, (x_desc, w_desc, more_desc, shared, sizes, GROUP_M, FURTHER)),
            ],
            [4, 1],
            [232, 40],
        )
