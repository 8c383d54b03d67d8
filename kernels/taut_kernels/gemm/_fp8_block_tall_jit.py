"""The Gluon kernel of FP8 products with 128 × 128 blocks of weights, 256 tokens a tile, on sm_90.

As :mod:`taut_kernels.gemm._fp8_block_hopper_jit`, but a group of four warps has twice 64 tokens, so
that a quarter less comes from L2, and one product under way: while it scales, the other multiplies.
The warp that asks for blocks multiplies both scales, too, and lays the factors beside the blocks:
whoever multiplies blocks waits for no load.

What the compilers do decides the time (H100, Triton 3.6, 2026-11-25; README, "Measured facts"):

- LLVM puts a product's scaling behind the last wait there is, past the next product, and sums end
  in local memory. A wait for nothing that names the sums (:func:`_add`) keeps it where it stands.
- ``use_acc`` is false in every call, yet no constant: with a constant each product gets registers
  of its own, and those of the one before are taken, too.
- `ptxas` has to be 12.9 or newer (:mod:`taut_kernels._assembler`).
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


@gluon.jit
def _begin(ring, slot, product, never, QUARTER: gl.constexpr):
    """Begin a product of a quarter of a tile's tokens in the registers of a former one."""
    columns = ring[1].index(slot).permute([1, 0])
    return hopper.warpgroup_mma(
        ring[0].index(slot * 4 + QUARTER), columns, product, use_acc=never, is_async=True
    )


@gluon.jit
def _factors(ring, slot, QUARTER: gl.constexpr, SUMS: gl.constexpr):
    return ring[2].index(slot).slice(QUARTER * 64, 64).load(gl.SliceLayout(1, SUMS))


@gluon.jit
def _add(sums, product, factors):
    """Add a finished product times its tokens' factors; here, and not behind the next wait."""
    sums += product * gl.expand_dims(factors, 1)
    return hopper.warpgroup_mma_wait(0, deps=[sums])


@gluon.jit
def _sums(ring, at, steps, never, GROUP: gl.constexpr, SUMS: gl.constexpr):
    """Return both halves of a group's scaled sums over K, whose first blocks are the ``at``-th."""
    COLUMNS: gl.constexpr = ring[1].shape[1]
    STAGES: gl.constexpr = ring[1].shape[0]
    UPPER: gl.constexpr = GROUP * 2
    LOWER: gl.constexpr = GROUP * 2 + 1
    upper = gl.zeros([64, COLUMNS], gl.float32, SUMS)
    lower = gl.zeros([64, COLUMNS], gl.float32, SUMS)
    product = gl.zeros([64, COLUMNS], gl.float32, SUMS)
    for k in range(steps):
        slot = (at + k) % STAGES
        mbarrier.wait(ring[3].index(slot), ((at + k) // STAGES) & 1)
        product = _begin(ring, slot, product, never, UPPER)
        above, below = _factors(ring, slot, UPPER, SUMS), _factors(ring, slot, LOWER, SUMS)
        product, above, below = hopper.warpgroup_mma_wait(0, deps=[product, above, below])
        upper = _add(upper, product, above)
        product = _begin(ring, slot, product, never, LOWER)
        product = hopper.warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(ring[4].index(slot), count=1)
        lower = _add(lower, product, below)
    return upper, lower


@gluon.jit
def _multiply(ring, out, bias_ptr, sizes, GROUP: gl.constexpr, GROUP_M: gl.constexpr):
    """Run a group that multiplies: its half of the tokens of every tile of the program."""
    y, y_desc = out
    N, steps, tiles_m, tiles_n = sizes
    COLUMNS: gl.constexpr = ring[1].shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    at = 0
    for item in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = place(item, tiles_m, tiles_n, GROUP_M)
        first_m, first_n = (pid_m * 2 + GROUP) * 128, pid_n * COLUMNS
        upper, lower = _sums(ring, at, steps, steps < 0, GROUP, SUMS)
        at += steps
        lower = with_bias(lower, bias_ptr, first_n, N, COLUMNS, SUMS).to(y.dtype)
        store(y_desc, y, lower, first_m + 64, first_n, 64, COLUMNS, GROUP)
        upper = with_bias(upper, bias_ptr, first_n, N, COLUMNS, SUMS).to(y.dtype)
        store(y_desc, y, upper, first_m, first_n, 64, COLUMNS, GROUP)
    tma.store_wait(0)


@gluon.jit
def _ask(x_desc, w_desc, ring, scales, strides, M, sizes, GROUP_M: gl.constexpr):
    """Run the warp that asks for blocks of both operands and multiplies their scales."""
    a, b, factors, full, empty = ring
    x_scale_ptr, w_scale_ptr = scales
    stride_xsm, stride_xsk, stride_wsn = strides
    _, steps, tiles_m, tiles_n = sizes
    STAGES: gl.constexpr = b.shape[0]
    COLUMNS: gl.constexpr = b.shape[1]
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    at, last = 0, steps - 1
    for item in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = place(item, tiles_m, tiles_n, GROUP_M)
        # Tokens beyond M are never stored: no mask. A tile's features are one block of weights.
        token = gl.minimum(pid_m * 256 + gl.arange(0, 256, LINE), M - 1).to(gl.int64)
        x_scales, w_scales = x_scale_ptr + token * stride_xsm, w_scale_ptr + pid_n * stride_wsn
        x_scale, w_scale = gl.load(x_scales), gl.load(w_scales)
        second = gl.minimum(1, last)
        next_x, next_w = gl.load(x_scales + second * stride_xsk), gl.load(w_scales + second)
        for k in range(steps):
            slot = at % STAGES
            landed, room, phase = full.index(slot), empty.index(slot), ((at // STAGES) & 1) ^ 1
            mbarrier.wait(room, phase)
            mbarrier.expect(landed, (256 + COLUMNS) * 128)
            for quarter in gl.static_range(4):
                first = [(pid_m * 4 + quarter) * 64, k * 128]
                load_block(x_desc, first, landed, a.index(slot * 4 + quarter))
            load_block(w_desc, [pid_n * COLUMNS, k * 128], landed, b.index(slot))
            # It is over at once: without it ptxas multiplies first, and blocks wait for scales.
            mbarrier.wait(room, phase)
            factors.index(slot).store(x_scale * w_scale)
            mbarrier.arrive(landed, count=1)
            x_scale, w_scale = next_x, next_w
            third = gl.minimum(k + 2, last)
            next_x, next_w = gl.load(x_scales + third * stride_xsk), gl.load(w_scales + third)
            at += 1


@gluon.jit(
    do_not_specialize=[
        "M", "N", "steps", "tiles_m", "tiles_n", "stride_xsm", "stride_xsk", "stride_wsn",
    ]
)  # fmt: skip
def fp8_block_tall_kernel(
    x_scale_ptr,  # [M, ceil(K/128)] fp32, any strides
    w_scale_ptr,  # [ceil(N/128), ceil(K/128)] fp32, contiguous along K
    bias_ptr,  # [N], or None
    x_desc,  # [M, K] e4m3 in blocks [64, 128]
    w_desc,  # [N, K] e4m3 in blocks [128, 128]
    y_desc,  # [M, N] in blocks [64, 32]
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
):
    COLUMNS: gl.constexpr = 128
    BYTES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    RESULTS: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 4, 64, 128], BYTES)
    b = gl.allocate_shared_memory(x_desc.dtype, [STAGES, COLUMNS, 128], BYTES)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES, 256], LINE)
    y = gl.allocate_shared_memory(y_desc.dtype, [4, 64, 32], RESULTS)
    # Blocks and factors come apart; both groups give them back.
    full, empty = barriers(STAGES, 2), barriers(STAGES, 2)
    hopper.fence_async_shared()
    ring, out = (a, b, factors, full, empty), (y, y_desc)
    sizes = (N, steps, tiles_m, tiles_n)
    scales, strides = (x_scale_ptr, w_scale_ptr), (stride_xsm, stride_xsk, stride_wsn)
    # 2 · 216 + 72 registers for 128 threads each are a multiprocessor's.
    gl.warp_specialize(
        [
            (_multiply, (ring, out, bias_ptr, sizes, 0, GROUP_M)),
            (_multiply, (ring, out, bias_ptr, sizes, 1, GROUP_M)),
            (_ask, (x_desc, w_desc, ring, scales, strides, M, sizes, GROUP_M)),
        ],
        [4, 1],
        [216, 72],
    )
