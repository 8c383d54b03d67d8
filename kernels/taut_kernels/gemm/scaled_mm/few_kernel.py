"""The Gluon kernel of the 8-bit products of some 65 to 128 tokens on sm_90.

Weights are the row operand of `wgmma`, tokens its columns. One warp of a program asks TMA for
blocks of both, 128 bytes of K deep, as far ahead as a ring of shared memory has room; one or two
groups of four warps multiply them, each 64 or 128 of the program's features by all its tokens. A
program has one tile. Programs that share one along K leave their parts in memory, and the last to
arrive adds them.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from taut_kernels.gemm.scaled_mm.parts_jit import add_parts
from taut_kernels.gemm.scaled_mm.store_jit import scaled
from taut_kernels.hopper import barrier_pairs, load_block, seen_as
from taut_kernels.hopper import first_token as first_of_part


@gluon.jit
def token_of_column(begin, column, M, BOX: gl.constexpr):
    """Return the token of a column of a tile that begins at one: blocks of BOX end with M."""
    return first_of_part((begin + column) // BOX, M, BOX) + column % BOX


@gluon.jit
def _ask(x_desc, w_desc, rings, sizes, first, STEP: gl.constexpr):
    """Run the warp that asks for a program's steps of K, the first of which is the ``first``-th.

    Of the tokens it asks for the ``boxes`` blocks of 32 that have some: the places of the others
    hold anything, and so do their columns of the sums, which nobody stores.
    """
    w, x, full, empty = rings
    M, _, first_row, first_token, steps = sizes
    STAGES: gl.constexpr = w.shape[0] // STEP
    BOXES: gl.constexpr = x.shape[0] // w.shape[0]
    boxes = gl.minimum((M - first_token + 31) // 32, BOXES)
    slot, phase = 0, 1
    for k in range(steps):
        landed = full.index(slot)
        mbarrier.wait(empty.index(slot), phase)
        # Bytes are a constant, the number of boxes is none.
        for count in gl.static_range(1, BOXES + 1):
            mbarrier.expect(landed, STEP * 128 * (w.shape[1] + count * 32), pred=boxes == count)
        for j in gl.static_range(STEP):
            block, column = slot * STEP + j, ((first + k) * STEP + j) * 128
            load_block(w_desc, [first_row, column], landed, w.index(block))
            for box in range(boxes):
                token = token_of_column(first_token, box * 32, M, 32)
                load_block(x_desc, [token, column], landed, x.index(block * BOXES + box))
        phase = gl.where(slot + 1 == STAGES, phase ^ 1, phase)
        slot = gl.where(slot + 1 == STAGES, 0, slot + 1)


@gluon.jit
def _sums(
    rings, steps, GROUP: gl.constexpr, GROUPS: gl.constexpr, STEP: gl.constexpr, SUMS: gl.constexpr
):
    """Return a group's sums [features, tokens]."""
    w, x, full, empty = rings
    ACC: gl.constexpr = gl.int32 if w.dtype == gl.int8 else gl.float32
    STAGES: gl.constexpr = x.shape[0] // STEP
    ROWS: gl.constexpr = w.shape[1]
    COLS: gl.constexpr = x.shape[1]
    acc = gl.zeros([ROWS, COLS], ACC, SUMS)
    slot, phase = 0, 0
    for k in range(steps):
        mbarrier.wait(full.index(slot), phase)
        for j in gl.static_range(STEP):
            rows = w.index((slot * STEP + j) * GROUPS + GROUP)
            columns = x.index(slot * STEP + j).permute([1, 0])
            acc = hopper.warpgroup_mma(rows, columns, acc, is_async=True)
        # Until those of the step before are done: its place may be filled again.
        acc = hopper.warpgroup_mma_wait(STEP, deps=[acc])
        before = gl.where(slot == 0, STAGES - 1, slot - 1)
        mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
        phase = gl.where(slot + 1 == STAGES, phase ^ 1, phase)
        slot = gl.where(slot + 1 == STAGES, 0, slot + 1)
    return hopper.warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def vectors(
    pointers, strides, first_row, first_token, M, N,
    ROWS: gl.constexpr, COLS: gl.constexpr, BOX: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Load what scales a group's sums: both scales, adjustment, zero points, bias; 0 if absent.

    Those of tokens are one value a thread; :func:`scaled` spreads them. A tile's tokens lie in
    blocks of BOX, as :func:`token_of_column` says.
    """
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offs_n = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
    offs_m = token_of_column(first_token, gl.arange(0, COLS, LINE), M, BOX)
    mask_n, mask_m = offs_n < N, offs_m < M
    x_scale = gl.load(pointers[0] + offs_m * strides[0], mask=mask_m, other=0.0)
    w_scale = gl.load(pointers[1] + offs_n * strides[1], mask=mask_n, other=0.0)
    azp_adj, azp, bias = 0, 0, 0
    if pointers[2] is not None:
        azp_adj = gl.load(pointers[2] + offs_n, mask=mask_n, other=0)
    if pointers[3] is not None:
        azp = gl.load(pointers[3] + offs_m, mask=mask_m, other=0)
    if pointers[4] is not None:
        bias = gl.load(pointers[4] + offs_n, mask=mask_n, other=0.0)
    return x_scale, w_scale, azp_adj, azp, bias


@gluon.jit
def store_tokens(y_ptr, values, M, N, first_row, first_token, BOX: gl.constexpr):
    """Store [features, tokens] as [tokens, features]: lanes run along the features.

    A tile's tokens lie in blocks of BOX, as :func:`token_of_column` says.
    """
    ROWS: gl.constexpr = values.shape[0]
    COLS: gl.constexpr = values.shape[1]
    W: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 8, 256 // ROWS], [1, 4], [0, 1])
    values = gl.convert_layout(values.to(y_ptr.dtype.element_ty), W)
    offs_n = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, W))
    columns = gl.arange(0, COLS, gl.SliceLayout(0, W))
    # Blocks beyond M have no tokens, and those of fewer than BOX in all some that do not exist.
    offs_m = token_of_column(first_token, columns, M, BOX)
    there = (first_token + columns // BOX * BOX < M) & (offs_m < M)
    mask = gl.expand_dims(offs_n < N, 1) & gl.expand_dims(there, 0)
    # int64: M · N passes 2**31 on long prompts.
    rows = y_ptr + gl.cast(first_token, gl.int64) * N
    offs_m -= first_token
    gl.store(rows + (gl.expand_dims(offs_m * N, 0) + gl.expand_dims(offs_n, 1)), values, mask=mask)


@gluon.jit
def _multiply(
    pointers, strides, rings, sizes,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, SPLIT_K: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """Run a group that multiplies."""
    M, N, first_row, first_token, steps = sizes
    ROWS: gl.constexpr = rings[0].shape[1]
    COLS: gl.constexpr = rings[1].shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32])
    first_row += GROUP * ROWS
    # Asked for before the products, used behind them.
    found = vectors(pointers, strides, first_row, first_token, M, N, ROWS, COLS, 32, SUMS)
    acc = _sums(rings, steps, GROUP, GROUPS, STEP, SUMS)
    finished = True
    if SPLIT_K > 1:
        tile = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
        acc, finished = add_parts(
            acc, pointers[6], pointers[7], tile, gl.program_id(1),
            (M - first_token + 31) // 32 * 32, SPLIT_K, SUMS,
        )  # fmt: skip
    if finished:
        values = scaled(acc, pointers, found, SUMS, 1)
        store_tokens(pointers[5], values, M, N, first_row, first_token, 32)


@gluon.jit(do_not_specialize=["M", "steps", "stride_xs", "stride_ws"])
def scaled_mm_few_kernel(
    x_scale_ptr,  # [M] or [1] fp32
    w_scale_ptr,  # [N] or [1] fp32
    azp_adj_ptr,  # [N] int32 or None
    azp_ptr,  # [M] int32 or None
    bias_ptr,  # [N] or None
    y_ptr,  # [M, N], contiguous
    partial_ptr,  # [token tiles, feature tiles, SPLIT_K, 64 * COLS] int32 or fp32
    arrivals_ptr,  # [token tiles * feature tiles] int32, 0 before and after; both None unsplit
    x_desc,  # [M, K] int8 or e4m3 in blocks [32, 128]
    w_desc,  # [N, K] as x in blocks [features of a tile, 128]
    M,
    N,
    steps,  # of K
    stride_xs,  # 1, or 0 for one scale
    stride_ws,
    COLS: gl.constexpr,  # tokens of a tile, 64 or 128
    SPLIT_K: gl.constexpr,  # more than 1 for tiles of 64 features only
    STAGES: gl.constexpr,
    STEP: gl.constexpr,  # blocks of K a step
):
    BYTES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    WIDTH: gl.constexpr = w_desc.block_shape[0]
    ROWS: gl.constexpr = 128 if WIDTH == 256 else 64
    GROUPS: gl.constexpr = WIDTH // ROWS
    BLOCKS: gl.constexpr = STAGES * STEP
    w_boxes = gl.allocate_shared_memory(w_desc.dtype, [BLOCKS, WIDTH, 128], BYTES)
    x_boxes = gl.allocate_shared_memory(x_desc.dtype, [BLOCKS * (COLS // 32), 32, 128], BYTES)
    w = seen_as(w_boxes, w_desc.dtype, [BLOCKS * GROUPS, ROWS, 128], BYTES)
    x = seen_as(x_boxes, x_desc.dtype, [BLOCKS, COLS, 128], BYTES)
    full, empty = barrier_pairs(STAGES, 1, GROUPS)
    hopper.fence_async_shared()
    pointers = (
        x_scale_ptr, w_scale_ptr, azp_adj_ptr, azp_ptr, bias_ptr, y_ptr, partial_ptr, arrivals_ptr,
    )  # fmt: skip
    strides = (stride_xs, stride_ws)
    first_row, first_token = gl.program_id(0) * WIDTH, gl.program_id(2) * COLS
    split = gl.program_id(1)
    first = steps * split // SPLIT_K
    own = steps * (split + 1) // SPLIT_K - first
    rings, boxes = (w, x, full, empty), (w_boxes, x_boxes, full, empty)
    sizes = (M, N, first_row, first_token, own)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (pointers, strides, rings, sizes, 0, 1, SPLIT_K, STEP)),
                (_ask, (x_desc, w_desc, boxes, sizes, first, STEP)),
            ],
            [1],
            [24],
        )
    else:
        # 2 · 240 + 24 registers for 128 threads each are what the launcher asks for.
        gl.warp_specialize(
            [
                (_multiply, (pointers, strides, rings, sizes, 0, 2, SPLIT_K, STEP)),
                (_multiply, (pointers, strides, rings, sizes, 1, 2, SPLIT_K, STEP)),
                (_ask, (x_desc, w_desc, boxes, sizes, first, STEP)),
            ],
            [4, 1],
            [240, 24],
        )
