"""The Gluon kernel of FP8 products with 128 × 128 blocks of weights, for many tokens on sm_90.

As :mod:`taut_kernels.gemm._scaled_mm_hopper_jit`: a warp asks TMA for blocks of both operands, two
groups of four warps share a tile, programs walk through tiles. But a step of K is one group of
scales, so its product starts from zero and enters the sums in fp32 times both scales. While one
group does that, the other one's product is to have the tensor cores (not seen on a card yet). With
128 tokens a group they come as two products of 64, one after the other, since sums and a step's
product of 128 × 128 would not fit a thread's registers twice.
"""

# ruff: noqa: RUF005 (Triton's front end adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from taut_kernels.attention._hopper_tile_jit import barriers, load_block
from taut_kernels.gemm._scaled_mm_hopper_jit import place
from taut_kernels.gemm._scaled_mm_hopper_store_jit import store


@gluon.jit
def _token_scales(x_scale_ptr, strides, first_m, M, HALVES: gl.constexpr, SUMS: gl.constexpr):
    """Return pointers to the first scale of each token of a group, 64 at a time."""
    pointers = ()
    for half in gl.static_range(HALVES):
        offs_m = first_m + half * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
        # Tokens beyond M are never stored: no mask.
        token = gl.minimum(offs_m, M - 1).to(gl.int64)
        pointers = pointers + (x_scale_ptr + token * strides[0],)
    return pointers


@gluon.jit
def _scales(token_scales, w_scales, strides, group, HALVES: gl.constexpr):
    """Load a step's scales: of the tokens, times that of the block of weights."""
    weight = gl.load(w_scales + group)
    found = ()
    for half in gl.static_range(HALVES):
        found = found + (gl.load(token_scales[half] + group * strides[1]) * weight,)
    return found


@gluon.jit
def _sums(
    ring, at, steps, token_scales, w_scales, strides,
    GROUP: gl.constexpr, HALVES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Return a group's scaled sums over ``steps`` blocks of K, the first of them the ``at``-th."""
    a, b, full, empty = ring
    STAGES: gl.constexpr = b.shape[0]
    COLUMNS: gl.constexpr = b.shape[1]
    sums = ()
    for _ in gl.static_range(HALVES):
        sums = sums + (gl.zeros([64, COLUMNS], gl.float32, SUMS),)
    product = gl.zeros([64, COLUMNS], gl.float32, SUMS)
    scales = _scales(token_scales, w_scales, strides, 0, HALVES)
    for k in range(steps):
        slot = (at + k) % STAGES
        # A step ahead: they are there when the product is.
        later = _scales(token_scales, w_scales, strides, gl.minimum(k + 1, steps - 1), HALVES)
        mbarrier.wait(full.index(slot), ((at + k) // STAGES) & 1)
        columns = b.index(slot).permute([1, 0])
        added = ()
        for half in gl.static_range(HALVES):
            rows = a.index((slot * 2 + GROUP) * HALVES + half)
            product = hopper.warpgroup_mma(rows, columns, product, use_acc=False, is_async=True)
            product = hopper.warpgroup_mma_wait(0, deps=[product])
            if half == HALVES - 1:
                mbarrier.arrive(empty.index(slot), count=1)
            added = added + (sums[half] + product * gl.expand_dims(scales[half], 1),)
        sums, scales = added, later
    return sums


@gluon.jit
def _with_bias(sums, bias_ptr, first_n, N, COLUMNS: gl.constexpr, SUMS: gl.constexpr):
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if bias_ptr is not None:
        offs_n = first_n + gl.arange(0, COLUMNS, LINE)
        bias = gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(gl.float32)
        sums += gl.expand_dims(gl.convert_layout(bias, gl.SliceLayout(0, SUMS)), 0)
    return sums


@gluon.jit
def _multiply(
    ring, out, pointers, strides, sizes,
    GROUP: gl.constexpr, HALVES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Run a group that multiplies: its half of the tokens of every tile of the program."""
    y, y_desc = out
    x_scale_ptr, w_scale_ptr, bias_ptr = pointers
    M, N, steps, tiles_m, tiles_n = sizes
    COLUMNS: gl.constexpr = ring[1].shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    at = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = place(tile, tiles_m, tiles_n, GROUP_M)
        first_m, first_n = (pid_m * 2 + GROUP) * (HALVES * 64), pid_n * COLUMNS
        token_scales = _token_scales(x_scale_ptr, strides, first_m, M, HALVES, SUMS)
        # A tile's features are one block of weights.
        w_scales = w_scale_ptr + pid_n * strides[2]
        sums = _sums(ring, at, steps, token_scales, w_scales, strides, GROUP, HALVES, SUMS)
        at += steps
        for half in gl.static_range(HALVES):
            values = _with_bias(sums[half], bias_ptr, first_n, N, COLUMNS, SUMS).to(y.dtype)
            store(y_desc, y, values, first_m + half * 64, first_n, 64, COLUMNS, GROUP, half * 2)
    tma.store_wait(0)


@gluon.jit
def _ask(x_desc, w_desc, ring, sizes, HALVES: gl.constexpr, GROUP_M: gl.constexpr):
    """Run the warp that asks for blocks of both operands."""
    a, b, full, empty = ring
    steps, tiles_m, tiles_n = sizes[2], sizes[3], sizes[4]
    STAGES: gl.constexpr = b.shape[0]
    COLUMNS: gl.constexpr = b.shape[1]
    PARTS: gl.constexpr = 2 * HALVES
    at = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = place(tile, tiles_m, tiles_n, GROUP_M)
        for k in range(steps):
            slot = at % STAGES
            landed = full.index(slot)
            mbarrier.wait(empty.index(slot), ((at // STAGES) & 1) ^ 1)
            mbarrier.expect(landed, (PARTS * 64 + COLUMNS) * 128)
            for part in gl.static_range(PARTS):
                first = (pid_m * PARTS + part) * 64
                load_block(x_desc, [first, k * 128], landed, a.index(slot * PARTS + part))
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
    HALVES: gl.constexpr,  # 64 tokens each, of a group: 1 or 2
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    COLUMNS: gl.constexpr = 128
    BYTES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    RESULTS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    a = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2 * HALVES, 64, 128], BYTES)
    b = gl.allocate_shared_memory(x_desc.dtype, [STAGES, COLUMNS, 128], BYTES)
    y = gl.allocate_shared_memory(y_desc.dtype, [4, 64, 64], RESULTS)
    full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
    hopper.fence_async_shared()
    ring, out = (a, b, full, empty), (y, y_desc)
    pointers = (x_scale_ptr, w_scale_ptr, bias_ptr)
    strides, sizes = (stride_xsm, stride_xsk, stride_wsn), (M, N, steps, tiles_m, tiles_n)
    # 2 · 232 + 40 registers for 128 threads each are a multiprocessor's.
    gl.warp_specialize(
        [
            (_multiply, (ring, out, pointers, strides, sizes, 0, HALVES, GROUP_M)),
            (_multiply, (ring, out, pointers, strides, sizes, 1, HALVES, GROUP_M)),
            (_ask, (x_desc, w_desc, ring, sizes, HALVES, GROUP_M)),
        ],
        [4, 1],
        [232, 40],
    )
