"""The Gluon kernel of the 8-bit products of many tokens on sm_90 whose groups take turns.

As :mod:`.hopper_kernel`, but each of the two groups of four warps has
tiles of its own. One multiplies the whole of K while the other scales and stores the sums of its
last tile and gets ready for the next: what a tile costs beside its products is hidden behind the
other group's. One warp fills the ring of shared memory for both, tile after tile, and a barrier a
group keeps their turns.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from taut_kernels.gemm.scaled_mm.store_jit import scaled, store, vectors
from taut_kernels.hopper import barrier_pairs, barriers, first_token, load_block, place


@gluon.jit
def _product(ring, at, acc, USE_ACC: gl.constexpr):
    """Issue the product of the ring's ``at``-th blocks."""
    a, b, full = ring[0], ring[1], ring[2]
    STAGES: gl.constexpr = a.shape[0]
    slot = at % STAGES
    mbarrier.wait(full.index(slot), (at // STAGES) & 1)
    rows, columns = a.index(slot), b.index(slot).permute([1, 0])
    return hopper.warpgroup_mma(rows, columns, acc, use_acc=USE_ACC, is_async=True)


@gluon.jit
def _sums(ring, turns, order, steps, GROUP: gl.constexpr, SUMS: gl.constexpr):
    """Return the sums of the program's ``order``-th tile; wait for the turn, and pass it on."""
    a, b, empty = ring[0], ring[1], ring[3]
    ACC: gl.constexpr = gl.int32 if a.dtype == gl.int8 else gl.float32
    STAGES: gl.constexpr = a.shape[0]
    ROWS: gl.constexpr = a.shape[1]
    COLUMNS: gl.constexpr = b.shape[1]
    at = order * steps
    acc = gl.zeros([ROWS, COLUMNS], ACC, SUMS)
    # Not for speed alone: a barrier cannot tell two rounds of the ring from none, so a group may
    # not ask for its blocks before the other has seen its own. Nobody gives the very first turn.
    mbarrier.wait(turns.index(GROUP), ((order // 2) & 1) ^ (1 - GROUP))
    acc = hopper.warpgroup_mma_wait(1, deps=[_product(ring, at, acc, False)])
    for k in range(1, steps):
        acc = _product(ring, at + k, acc, True)
        # Until the step before is done: its place may be filled again.
        acc = hopper.warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((at + k - 1) % STAGES), count=1)
    # The other group's products queue up behind those of the last step.
    mbarrier.arrive(turns.index(1 - GROUP), count=1)
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((at + steps - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _two_products(ring, at, acc, more, USE_ACC: gl.constexpr):
    """Issue the products of the ring's ``at``-th blocks with both parts of the weights."""
    a, b, full, c = ring[0], ring[1], ring[2], ring[4]
    STAGES: gl.constexpr = a.shape[0]
    slot = at % STAGES
    mbarrier.wait(full.index(slot), (at // STAGES) & 1)
    rows, columns = a.index(slot), b.index(slot).permute([1, 0])
    acc = hopper.warpgroup_mma(rows, columns, acc, use_acc=USE_ACC, is_async=True)
    columns = c.index(slot).permute([1, 0])
    more = hopper.warpgroup_mma(rows, columns, more, use_acc=USE_ACC, is_async=True)
    return acc, more


@gluon.jit
def _two_sums(
    ring, turns, order, steps, GROUP: gl.constexpr, SUMS: gl.constexpr, MORE: gl.constexpr
):  # fmt: skip
    """Return as :func:`_sums` the sums of a tile's first columns, and those of the others."""
    a, b, empty, c = ring[0], ring[1], ring[3], ring[4]
    ACC: gl.constexpr = gl.int32 if a.dtype == gl.int8 else gl.float32
    STAGES: gl.constexpr = a.shape[0]
    ROWS: gl.constexpr = a.shape[1]
    COLUMNS: gl.constexpr = b.shape[1]
    FURTHER: gl.constexpr = c.shape[1]
    at = order * steps
    acc = gl.zeros([ROWS, COLUMNS], ACC, SUMS)
    more = gl.zeros([ROWS, FURTHER], ACC, MORE)
    mbarrier.wait(turns.index(GROUP), ((order // 2) & 1) ^ (1 - GROUP))
    acc, more = _two_products(ring, at, acc, more, False)
    # Two products a step: those of the last step may be under way.
    acc, more = hopper.warpgroup_mma_wait(2, deps=[acc, more])
    for k in range(1, steps):
        acc, more = _two_products(ring, at + k, acc, more, True)
        acc, more = hopper.warpgroup_mma_wait(2, deps=[acc, more])
        mbarrier.arrive(empty.index((at + k - 1) % STAGES), count=1)
    mbarrier.arrive(turns.index(1 - GROUP), count=1)
    acc, more = hopper.warpgroup_mma_wait(0, deps=[acc, more])
    mbarrier.arrive(empty.index((at + steps - 1) % STAGES), count=1)
    return acc, more


@gluon.jit
def _multiply_both(
    ring, turns, out, pointers, strides, sizes, GROUP: gl.constexpr, GROUP_M: gl.constexpr
):  # fmt: skip
    """Run a group as :func:`_multiply` does, whose tiles have a second part of columns."""
    y, y_desc = out
    M, N, steps, tiles_m, tiles_n = sizes
    ROWS: gl.constexpr = ring[0].shape[1]
    COLUMNS: gl.constexpr = ring[1].shape[1]
    FURTHER: gl.constexpr = ring[4].shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    MORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FURTHER, 32])
    programs = gl.num_programs(0)
    for tile in range(gl.program_id(0) + GROUP * programs, tiles_m * tiles_n, 2 * programs):
        pid_m, pid_n = place(tile, tiles_m, tiles_n, GROUP_M)
        first_m, first_n = first_token(pid_m, M, ROWS), pid_n * (COLUMNS + FURTHER)
        second_n = first_n + COLUMNS
        found = vectors(pointers, strides, first_m, first_n, M, N, ROWS, COLUMNS, SUMS)
        others = vectors(pointers, strides, first_m, second_n, M, N, ROWS, FURTHER, MORE)
        acc, more = _two_sums(ring, turns, tile // programs, steps, GROUP, SUMS, MORE)
        values = scaled(acc, pointers, found, SUMS).to(y.dtype)
        store(y_desc, y, values, first_m, first_n, ROWS, COLUMNS, GROUP)
        values = scaled(more, pointers, others, MORE).to(y.dtype)
        store(y_desc, y, values, first_m, second_n, ROWS, FURTHER, GROUP, 4)
    tma.store_wait(0)


@gluon.jit
def _multiply(
    ring, turns, out, pointers, strides, sizes, GROUP: gl.constexpr, GROUP_M: gl.constexpr
):  # fmt: skip
    """Run a group that multiplies: every second tile of the program."""
    y, y_desc = out
    M, N, steps, tiles_m, tiles_n = sizes
    ROWS: gl.constexpr = ring[0].shape[1]
    COLUMNS: gl.constexpr = ring[1].shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    programs = gl.num_programs(0)
    for tile in range(gl.program_id(0) + GROUP * programs, tiles_m * tiles_n, 2 * programs):
        pid_m, pid_n = place(tile, tiles_m, tiles_n, GROUP_M)
        first_m, first_n = first_token(pid_m, M, ROWS), pid_n * COLUMNS
        # Asked for before the products, used behind them.
        found = vectors(pointers, strides, first_m, first_n, M, N, ROWS, COLUMNS, SUMS)
        acc = _sums(ring, turns, tile // programs, steps, GROUP, SUMS)
        values = scaled(acc, pointers, found, SUMS).to(y.dtype)
        store(y_desc, y, values, first_m, first_n, ROWS, COLUMNS, GROUP)
    tma.store_wait(0)


@gluon.jit
def _ask(x_desc, w_desc, more_desc, ring, sizes, GROUP_M: gl.constexpr, FURTHER: gl.constexpr):
    """Run the warp that asks for blocks of both operands, for both groups in turn."""
    a, b, full, empty, c = ring
    M, _, steps, tiles_m, tiles_n = sizes
    STAGES: gl.constexpr = a.shape[0]
    ROWS: gl.constexpr = a.shape[1]
    COLUMNS: gl.constexpr = b.shape[1]
    WIDTH: gl.constexpr = COLUMNS + FURTHER
    at = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = place(tile, tiles_m, tiles_n, GROUP_M)
        for k in range(steps):
            slot = at % STAGES
            landed = full.index(slot)
            mbarrier.wait(empty.index(slot), ((at // STAGES) & 1) ^ 1)
            mbarrier.expect(landed, (ROWS + WIDTH) * 128)
            load_block(x_desc, [first_token(pid_m, M, ROWS), k * 128], landed, a.index(slot))
            load_block(w_desc, [pid_n * WIDTH, k * 128], landed, b.index(slot))
            if FURTHER:
                first = pid_n * WIDTH + COLUMNS
                load_block(more_desc, [first, k * 128], landed, c.index(slot))
            at += 1


@gluon.jit(
    do_not_specialize=["M", "N", "steps", "tiles_m", "tiles_n", "stride_xs", "stride_ws"]
)  # fmt: skip
def scaled_mm_turns_kernel(
    x_scale_ptr,  # [M] or [1] fp32
    w_scale_ptr,  # [N] or [1] fp32
    azp_adj_ptr,  # [N] int32, or None
    azp_ptr,  # [M] int32, or None
    bias_ptr,  # [N], or None
    x_desc,  # [M, K] int8 or e4m3 in blocks [ROWS, 128]
    w_desc,  # [N, K] as x in blocks [COLUMNS, 128]
    more_desc,  # the same in blocks [FURTHER, 128], or None
    y_desc,  # [M, N] in blocks [ROWS, 64], or 32 with FURTHER
    M,
    N,
    steps,  # blocks of K
    tiles_m,
    tiles_n,
    stride_xs,  # 1, or 0 for one scale
    stride_ws,
    ROWS: gl.constexpr,  # tokens of a tile, 64 or 128
    COLUMNS: gl.constexpr,  # features of a tile, 256 or 128
    FURTHER: gl.constexpr,  # and as many more, 0, 32 or 64
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    BYTES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    PART: gl.constexpr = 32 if FURTHER else 64
    # Where all of it is one wave, nobody multiplies while results leave: more room for them.
    PLACES: gl.constexpr = 1 if ROWS == 128 or FURTHER == 0 else (5 if FURTHER == 32 else 3)
    HALVES: gl.constexpr = gl.NVMMASharedLayout(2 * PART, 16, 2)
    a = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, 128], BYTES)
    b = gl.allocate_shared_memory(x_desc.dtype, [STAGES, COLUMNS, 128], BYTES)
    y = gl.allocate_shared_memory(y_desc.dtype, [2 * PLACES, ROWS, PART], HALVES)
    full, empty = barrier_pairs(STAGES, 1, 1)
    turns = barriers(2, 1)
    hopper.fence_async_shared()
    pointers = (x_scale_ptr, w_scale_ptr, azp_adj_ptr, azp_ptr, bias_ptr)
    strides, sizes = (stride_xs, stride_ws), (M, N, steps, tiles_m, tiles_n)
    out = (y, y_desc)
    # 2 · 232 + 40 registers for 128 threads each are a multiprocessor's.
    if FURTHER:
        c = gl.allocate_shared_memory(x_desc.dtype, [STAGES, FURTHER, 128], BYTES)
        ring = (a, b, full, empty, c)
        gl.warp_specialize(
            [
                (_multiply_both, (ring, turns, out, pointers, strides, sizes, 0, GROUP_M)),
                (_multiply_both, (ring, turns, out, pointers, strides, sizes, 1, GROUP_M)),
                (_ask, (x_desc, w_desc, more_desc, ring, sizes, GROUP_M, FURTHER)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        ring = (a, b, full, empty, b)
        gl.warp_specialize(
            [
                (_multiply, (ring, turns, out, pointers, strides, sizes, 0, GROUP_M)),
                (_multiply, (ring, turns, out, pointers, strides, sizes, 1, GROUP_M)),
                (_ask, (x_desc, w_desc, more_desc, ring, sizes, GROUP_M, FURTHER)),
            ],
            [4, 1],
            [232, 40],
        )
