"""The Gluon kernel of FP8 products with 128 × 128 blocks of weights, 256 tokens a tile, on sm_90.

As :mod:`.blocks_hopper_kernel`, but a group of four warps has twice 64 tokens, so
that a quarter less comes from L2, and one product under way: while it scales, the other multiplies.
The warp that asks for blocks loads the scales, too, multiplies them and lays the factors beside the
blocks: a multiplication less for those who have no registers left.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from taut_kernels.gemm.scaled_mm.blocks_step_jit import add, ask, begin, give_back, has_room, landed
from taut_kernels.gemm.scaled_mm.store_jit import store, with_bias
from taut_kernels.hopper import barrier_pairs, first_token, place


@gluon.jit
def _factors(ring, slot, PART: gl.constexpr, SUMS: gl.constexpr):
    return ring[2].index(slot).slice(PART * 64, 64).load(gl.SliceLayout(1, SUMS))


@gluon.jit
def _sums(ring, at, steps, never, GROUP: gl.constexpr, SUMS: gl.constexpr):
    """Return both halves of a group's scaled sums over K, whose first blocks are the ``at``-th.

    What the next step needs is waited for and read behind the second product.
    """
    COLUMNS: gl.constexpr = ring[1].shape[1]
    UPPER: gl.constexpr = GROUP * 2
    LOWER: gl.constexpr = GROUP * 2 + 1
    upper = gl.zeros([64, COLUMNS], gl.float32, SUMS)
    lower = gl.zeros([64, COLUMNS], gl.float32, SUMS)
    product = gl.zeros([64, COLUMNS], gl.float32, SUMS)
    slot = landed(ring, at)
    above, below = _factors(ring, slot, UPPER, SUMS), _factors(ring, slot, LOWER, SUMS)
    for k in range(steps):
        product = begin(ring, slot, product, never, UPPER)
        product = hopper.warpgroup_mma_wait(0, deps=[product])
        upper = add(upper, product, above, 0)
        product = begin(ring, slot, product, never, LOWER)
        slot = landed(ring, at + gl.minimum(k + 1, steps - 1))
        above, following = _factors(ring, slot, UPPER, SUMS), _factors(ring, slot, LOWER, SUMS)
        product, above, following = hopper.warpgroup_mma_wait(0, deps=[product, above, following])
        give_back(ring, at + k)
        lower = add(lower, product, below, 0)
        below = following
    return upper, lower


@gluon.jit
def _multiply(ring, out, bias_ptr, sizes, GROUP: gl.constexpr, GROUP_M: gl.constexpr):
    """Run a group that multiplies: its half of the tokens of every tile of the program."""
    y, y_desc = out
    M, N, steps, tiles_m, tiles_n = sizes
    COLUMNS: gl.constexpr = ring[1].shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    at = 0
    for item in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = place(item, tiles_m, tiles_n, GROUP_M)
        part, first_n = (pid_m * 2 + GROUP) * 2, pid_n * COLUMNS
        upper, lower = _sums(ring, at, steps, steps < 0, GROUP, SUMS)
        at += steps
        lower = with_bias(lower, bias_ptr, first_n, N, COLUMNS, SUMS).to(y.dtype)
        store(y_desc, y, lower, first_token(part + 1, M, 64), first_n, 64, COLUMNS, GROUP)
        upper = with_bias(upper, bias_ptr, first_n, N, COLUMNS, SUMS).to(y.dtype)
        store(y_desc, y, upper, first_token(part, M, 64), first_n, 64, COLUMNS, GROUP)
    tma.store_wait(0)


@gluon.jit
def _put(ring, at, factors):
    """Lay the factors of the ring's ``at``-th blocks beside them."""
    slot = has_room(ring, at)
    ring[2].index(slot).store(gl.reshape(factors, [256]))
    mbarrier.arrive(ring[3].index(slot), count=1)


@gluon.jit
def _feed(x_desc, w_desc, ring, scales, strides, sizes, GROUP_M: gl.constexpr):
    """Run the warp that asks for blocks of both operands and multiplies their scales.

    It waits for all loads under way at once, so it multiplies two steps' scales together and asks
    for the next two's right behind: they come while two steps' blocks do.
    """
    x_scale_ptr, w_scale_ptr = scales
    stride_xsm, stride_xsk, stride_wsn = strides
    M, _, steps, tiles_m, tiles_n = sizes
    # A tile's tokens as [8, 32]: a lane has one of each row, and its own copy of a weights' scale.
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0])
    rows = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, LANES)), 1)
    lanes = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, LANES)), 0)
    # All 0, which the compiler cannot know: one scale for all lanes it moves to a uniform register,
    # and waits for its load there.
    same = lanes * gl.where(M < 0, 1, 0)
    at, last = 0, steps - 1
    for item in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = place(item, tiles_m, tiles_n, GROUP_M)
        # Tokens beyond M are never stored: no mask. A tile's features are one block of weights.
        token = first_token(pid_m * 4 + rows // 2, M, 64) + rows % 2 * 32 + lanes
        x_scales = x_scale_ptr + gl.minimum(token, M - 1).to(gl.int64) * stride_xsm
        w_scales = w_scale_ptr + (pid_n * stride_wsn + same)
        second = gl.minimum(1, last)
        even_x, even_w = gl.load(x_scales), gl.load(w_scales)
        odd_x, odd_w = gl.load(x_scales + second * stride_xsk), gl.load(w_scales + second)
        for k in range(0, last, 2):
            ask(x_desc, w_desc, ring, pid_m, pid_n, at + k, k, M)
            # It is over at once: without it ptxas multiplies first, and blocks wait for scales.
            has_room(ring, at + k)
            even, odd = even_x * even_w, odd_x * odd_w
            third, fourth = gl.minimum(k + 2, last), gl.minimum(k + 3, last)
            even_x, even_w = gl.load(x_scales + third * stride_xsk), gl.load(w_scales + third)
            odd_x, odd_w = gl.load(x_scales + fourth * stride_xsk), gl.load(w_scales + fourth)
            _put(ring, at + k, even)
            ask(x_desc, w_desc, ring, pid_m, pid_n, at + k + 1, k + 1, M)
            _put(ring, at + k + 1, odd)
        if steps % 2 == 1:
            ask(x_desc, w_desc, ring, pid_m, pid_n, at + last, last, M)
            _put(ring, at + last, even_x * even_w)
        at += steps


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
    full, empty = barrier_pairs(STAGES, 2, 2)
    hopper.fence_async_shared()
    ring, out = (a, b, factors, full, empty), (y, y_desc)
    sizes = (M, N, steps, tiles_m, tiles_n)
    scales, strides = (x_scale_ptr, w_scale_ptr), (stride_xsm, stride_xsk, stride_wsn)
    # 2 · 216 + 72 registers for 128 threads each are a multiprocessor's.
    gl.warp_specialize(
        [
            (_multiply, (ring, out, bias_ptr, sizes, 0, GROUP_M)),
            (_multiply, (ring, out, bias_ptr, sizes, 1, GROUP_M)),
            (_feed, (x_desc, w_desc, ring, scales, strides, sizes, GROUP_M)),
        ],
        [4, 1],
        [216, 72],
    )
