"""The Gluon kernel of FP8 products with 128 × 128 blocks of weights, for many tokens on sm_90.

As :mod:`taut_kernels.gemm._scaled_mm_hopper_jit`: a warp asks TMA for blocks of both operands, two
groups of four warps share a tile of 128 tokens, programs walk through tiles. But a step of K is one
group of scales, so its product starts from zero and enters the sums in fp32 times both scales. A
group has two products on their way: one is scaled while the other one multiplies. Where tiles are
fewer than multiprocessors, several programs share one along K. Of many tokens
:mod:`taut_kernels.gemm._fp8_block_tall_jit` is faster.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from taut_kernels.attention._hopper_tile_jit import barriers, load_block
from taut_kernels.gemm._scaled_mm_hopper_jit import place
from taut_kernels.gemm._scaled_mm_hopper_store_jit import store, with_bias
from taut_kernels.gemm._scaled_mm_parts_jit import add_parts


@gluon.jit
def _begin(ring, at, GROUP: gl.constexpr, SUMS: gl.constexpr):
    """Begin a group's product of the ring's ``at``-th blocks."""
    a, b, full, _ = ring
    STAGES: gl.constexpr = b.shape[0]
    COLUMNS: gl.constexpr = b.shape[1]
    slot = at % STAGES
    mbarrier.wait(full.index(slot), (at // STAGES) & 1)
    zeros = gl.zeros([64, COLUMNS], gl.float32, SUMS)
    columns = b.index(slot).permute([1, 0])
    return hopper.warpgroup_mma(
        a.index(slot * 2 + GROUP), columns, zeros, use_acc=False, is_async=True
    )


@gluon.jit
def _scaled(ring, at, sums, product, token, weight, RUNNING: gl.constexpr):
    """Wait for the product of the ring's ``at``-th blocks and add it times its scales.

    ``RUNNING`` products begun after it may go on.
    """
    STAGES: gl.constexpr = ring[1].shape[0]
    product = hopper.warpgroup_mma_wait(RUNNING, deps=[product])
    mbarrier.arrive(ring[3].index(at % STAGES), count=1)
    return sums + product * gl.expand_dims(token * weight, 1)


@gluon.jit
def _sums(
    ring, at, steps, x_scales, stride_xsk, w_scales, GROUP: gl.constexpr, SUMS: gl.constexpr
):  # fmt: skip
    """Return a group's scaled sums over ``steps`` blocks of K, the first of them the ``at``-th.

    No product is on its way from one pair of steps to the next: ptxas copied it, and waited for
    that. Scales are asked for behind the products: ptxas multiplies a pair of them at once, and
    what was still to begin waited with it (a fifth of a group's time, H100, 2026-11-25).
    """
    COLUMNS: gl.constexpr = ring[1].shape[1]
    sums = gl.zeros([64, COLUMNS], gl.float32, SUMS)
    for k in range(0, steps - 1, 2):
        even = _begin(ring, at + k, GROUP, SUMS)
        odd = _begin(ring, at + k + 1, GROUP, SUMS)
        even_token, even_weight = gl.load(x_scales), gl.load(w_scales + k)
        odd_token, odd_weight = gl.load(x_scales + stride_xsk), gl.load(w_scales + k + 1)
        sums = _scaled(ring, at + k, sums, even, even_token, even_weight, 1)
        sums = _scaled(ring, at + k + 1, sums, odd, odd_token, odd_weight, 0)
        x_scales += 2 * stride_xsk
    for k in range(steps // 2 * 2, steps):  # the last step of an odd number
        product = _begin(ring, at + k, GROUP, SUMS)
        sums = _scaled(ring, at + k, sums, product, gl.load(x_scales), gl.load(w_scales + k), 0)
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
    ring, out, pointers, strides, sizes,
    GROUP: gl.constexpr, GROUP_M: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """Run a group that multiplies: its half of the tokens of every share of the program."""
    y, y_desc = out
    x_scale_ptr, w_scale_ptr, bias_ptr, partial_ptr, arrivals_ptr = pointers
    M, N, steps, tiles_m, tiles_n = sizes
    COLUMNS: gl.constexpr = ring[1].shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    at = 0
    for item in range(gl.program_id(0), tiles_m * tiles_n * SPLIT_K, gl.num_programs(0)):
        pid_m, pid_n, first, own = _share(item, tiles_m, tiles_n, steps, GROUP_M, SPLIT_K)
        first_m, first_n = (pid_m * 2 + GROUP) * 64, pid_n * COLUMNS
        offs_m = first_m + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
        # Tokens beyond M are never stored: no mask.
        token = gl.minimum(offs_m, M - 1).to(gl.int64)
        x_scales = x_scale_ptr + (token * strides[0] + first * strides[1])
        # A tile's features are one block of weights.
        w_scales = w_scale_ptr + (pid_n * strides[2] + first)
        sums = _sums(ring, at, own, x_scales, strides[1], w_scales, GROUP, SUMS)
        at += own
        finished = True
        if SPLIT_K > 1:
            half = item // SPLIT_K * 2 + GROUP
            sums, finished = add_parts(
                sums, partial_ptr, arrivals_ptr, half, item % SPLIT_K, COLUMNS, SPLIT_K, SUMS
            )
        if finished:
            values = with_bias(sums, bias_ptr, first_n, N, COLUMNS, SUMS).to(y.dtype)
            store(y_desc, y, values, first_m, first_n, 64, COLUMNS, GROUP)
    tma.store_wait(0)


@gluon.jit
def _ask(x_desc, w_desc, ring, sizes, GROUP_M: gl.constexpr, SPLIT_K: gl.constexpr):
    """Run the warp that asks for blocks of both operands."""
    a, b, full, empty = ring
    steps, tiles_m, tiles_n = sizes[2], sizes[3], sizes[4]
    STAGES: gl.constexpr = b.shape[0]
    COLUMNS: gl.constexpr = b.shape[1]
    at = 0
    for item in range(gl.program_id(0), tiles_m * tiles_n * SPLIT_K, gl.num_programs(0)):
        pid_m, pid_n, first, own = _share(item, tiles_m, tiles_n, steps, GROUP_M, SPLIT_K)
        for k in range(first, first + own):
            slot = at % STAGES
            landed = full.index(slot)
            mbarrier.wait(empty.index(slot), ((at // STAGES) & 1) ^ 1)
            mbarrier.expect(landed, (128 + COLUMNS) * 128)
            for group in gl.static_range(2):
                tokens = (pid_m * 2 + group) * 64
                load_block(x_desc, [tokens, k * 128], landed, a.index(slot * 2 + group))
            load_block(w_desc, [pid_n * COLUMNS, k * 128], landed, b.index(slot))
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
    partial_ptr,  # [tiles, 2, SPLIT_K, 64 * 128] fp32; both None unsplit
    arrivals_ptr,  # [tiles * 2] int32, 0 before and after
    x_desc,  # [M, K] e4m3 in blocks [64, 128]
    w_desc,  # [N, K] e4m3 in blocks [128, 128]
    y_desc,  # [M, N] in blocks [64, 64]
    M,
    N,
    steps,  # blocks of K
    tiles_m,
    tiles_n,
    stride_xsm,
    stride_xsk,
    stride_wsn,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    SPLIT_K: gl.constexpr,
):
    COLUMNS: gl.constexpr = 128
    BYTES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    RESULTS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    a = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, 64, 128], BYTES)
    b = gl.allocate_shared_memory(x_desc.dtype, [STAGES, COLUMNS, 128], BYTES)
    y = gl.allocate_shared_memory(y_desc.dtype, [4, 64, 64], RESULTS)
    full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
    hopper.fence_async_shared()
    ring, out = (a, b, full, empty), (y, y_desc)
    pointers = (x_scale_ptr, w_scale_ptr, bias_ptr, partial_ptr, arrivals_ptr)
    strides, sizes = (stride_xsm, stride_xsk, stride_wsn), (M, N, steps, tiles_m, tiles_n)
    # 2 · 232 + 40 registers for 128 threads each are a multiprocessor's.
    gl.warp_specialize(
        [
            (_multiply, (ring, out, pointers, strides, sizes, 0, GROUP_M, SPLIT_K)),
            (_multiply, (ring, out, pointers, strides, sizes, 1, GROUP_M, SPLIT_K)),
            (_ask, (x_desc, w_desc, ring, sizes, GROUP_M, SPLIT_K)),
        ],
        [4, 1],
        [232, 40],
    )
