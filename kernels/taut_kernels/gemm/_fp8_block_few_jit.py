"""The Gluon kernel of FP8 products with 128 × 128 blocks of weights, for few tokens on sm_90.

Weights are the row operand of `wgmma`, tokens its columns. Four warps copy both by `cp.async`, as
far ahead as a ring of shared memory has room, and the scales with them: whoever waits for a step
has all of it. (In :mod:`taut_kernels.gemm._fp8_block_jit`, Triton's own ring, nothing can bring
scales along.) A step is two blocks of K, two products: one is scaled
while the other multiplies. Programs that share a tile along K leave their parts in memory, and the
last to arrive adds them.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from taut_kernels.attention._hopper_tile_jit import barrier
from taut_kernels.gemm._scaled_mm_few_jit import store_tokens, token_of_column
from taut_kernels.gemm._scaled_mm_parts_jit import add_parts

# Triton 3.9 has the first name, 3.6 only the second.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _sources(
    pointers, strides, first_row, first_token, M, N,
    ROWS: gl.constexpr, COLS: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Return pointers to the first blocks of tokens and weights and to their scales, and a mask.

    Rows beyond N read the last one again; they are never stored. Tokens that do not exist are left
    out: one read by every column of every program is one place of L2 for all of them (of one token
    16 columns took 7.7 µs where 16 tokens take 6.3; H200, 4096 × 4096).
    """
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr = pointers
    stride_xm, stride_wn, stride_xsm, _, stride_wsn = strides
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    k = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, BYTES)), 0)
    # int64: M·stride and N·stride pass 2**31 on large layers.
    row = gl.minimum(first_row + gl.arange(0, ROWS, gl.SliceLayout(1, BYTES)), N - 1)
    w = w_ptr + (gl.expand_dims(gl.cast(row, gl.int64) * stride_wn, 1) + k)
    columns = gl.arange(0, COLS, gl.SliceLayout(1, BYTES))
    token = token_of_column(first_token, columns, M, BOX)
    there = gl.expand_dims(token < M, 1)
    x = x_ptr + (gl.expand_dims(gl.cast(token, gl.int64) * stride_xm, 1) + k)
    # No mask: one of a few bytes costs more than it spares.
    token = gl.minimum(token_of_column(first_token, gl.arange(0, COLS, LINE), M, BOX), M - 1)
    x_scale = x_scale_ptr + gl.cast(token, gl.int64) * stride_xsm
    w_scale = w_scale_ptr + (first_row // 128 * stride_wsn + gl.arange(0, 1, LINE))
    return x, w, x_scale, w_scale, there & (k < 128)


@gluon.jit
def _half(STAGES: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, ELEMENT: gl.constexpr):
    """Make the ring of one of a step's two blocks: tokens, weights, their scales.

    Memory of its own: between copies into one allocation Triton 3.6 puts a `bar.sync`.
    """
    BYTES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return (
        gl.allocate_shared_memory(ELEMENT, [STAGES, COLS, 128], BYTES),
        gl.allocate_shared_memory(ELEMENT, [STAGES, ROWS, 128], BYTES),
        gl.allocate_shared_memory(gl.float32, [STAGES, COLS], LINE),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1], LINE),
    )


@gluon.jit
def _ask(rings, sources, stride_xsk, slot, step, K, EVEN_K: gl.constexpr):
    """Copy a step's blocks and scales into the rings; zeros beyond K."""
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    for half in gl.static_range(2):
        x, w, x_scale, w_scale = rings[half]
        group = step * 2 + half
        first = group * 128
        if EVEN_K:
            _copy(w.index(slot), sources[1] + first)
            _copy(x.index(slot), sources[0] + first, mask=sources[4])
        else:
            k = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, BYTES)), 0)
            _copy(w.index(slot), sources[1] + first, mask=k < K - first)
            _copy(x.index(slot), sources[0] + first, mask=sources[4] & (k < K - first))
            # The second half may have no block of its own: zeros times the last one's scales.
            group = gl.minimum(group, (K + 127) // 128 - 1)
        _copy(x_scale.index(slot), sources[2] + group * stride_xsk)
        _copy(w_scale.index(slot), sources[3] + group)


@gluon.jit
def _begin(ring, slot, product, never):
    """Begin the product of a block in the registers of a former one."""
    columns = ring[0].index(slot).permute([1, 0])
    return hopper.warpgroup_mma(ring[1].index(slot), columns, product, use_acc=never, is_async=True)


@gluon.jit
def _factors(ring, slot, SUMS: gl.constexpr):
    """Read what scales a block's product: its tokens' scales times the weights' one."""
    TOKENS: gl.constexpr = gl.SliceLayout(0, SUMS)
    return ring[2].index(slot).load(TOKENS) * ring[3].index(slot).load(TOKENS)


@gluon.jit
def _add(sums, product, factors, RUNNING: gl.constexpr):
    """Add a finished product times its factors; here, and not behind the next wait.

    ``RUNNING`` products are under way. See :mod:`taut_kernels.gemm._fp8_block_step_jit`.
    """
    sums += product * gl.expand_dims(factors, 0)
    return hopper.warpgroup_mma_wait(RUNNING, deps=[sums])


@gluon.jit
def _sums(
    rings, sources, stride_xsk, first, own, K, never,
    STAGES: gl.constexpr, EVEN_K: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Return the scaled sums [features, tokens] over ``own`` steps, the ``first`` and following."""
    AHEAD: gl.constexpr = STAGES - 1
    ROWS: gl.constexpr = rings[0][1].shape[1]
    COLS: gl.constexpr = rings[0][0].shape[1]
    for i in gl.static_range(AHEAD):
        if i < own:
            _ask(rings, sources, stride_xsk, i, first + i, K, EVEN_K)
        async_copy.commit_group()
    sums = gl.zeros([ROWS, COLS], gl.float32, SUMS)
    even = gl.zeros([ROWS, COLS], gl.float32, SUMS)
    odd = gl.zeros([ROWS, COLS], gl.float32, SUMS)
    for i in range(own):
        async_copy.wait_group(AHEAD - 1)
        # Everybody's copies are there, and nobody reads the step before any more. No fence between
        # proxies, as in Triton's own rings of `cp.async` in front of `wgmma`.
        barrier()
        slot = i % STAGES
        first_half, second_half = _factors(rings[0], slot, SUMS), _factors(rings[1], slot, SUMS)
        even = _begin(rings[0], slot, even, never)
        odd = _begin(rings[1], slot, odd, never)
        if i + AHEAD < own:
            _ask(rings, sources, stride_xsk, (i + AHEAD) % STAGES, first + i + AHEAD, K, EVEN_K)
        async_copy.commit_group()
        even = hopper.warpgroup_mma_wait(1, deps=[even])
        sums = _add(sums, even, first_half, 1)
        odd = hopper.warpgroup_mma_wait(0, deps=[odd])
        sums = _add(sums, odd, second_half, 0)
    async_copy.wait_group(0)
    return sums


@gluon.jit
def _with_bias(sums, bias_ptr, first_row, N, ROWS: gl.constexpr, SUMS: gl.constexpr):
    if bias_ptr is not None:
        offs_n = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        bias = gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
        sums += gl.expand_dims(bias.to(gl.float32), 1)
    return sums


@gluon.jit(do_not_specialize=["M", "stride_xsm", "stride_xsk", "stride_wsn"])
def fp8_block_few_kernel(
    x_ptr,  # [M, K] e4m3, stride_xk = 1
    w_ptr,  # [N, K] e4m3, stride_wk = 1
    x_scale_ptr,  # [M, ceil(K/128)] fp32, any strides
    w_scale_ptr,  # [ceil(N/128), ceil(K/128)] fp32, contiguous along K
    bias_ptr,  # [N], or None
    y_ptr,  # [M, N], contiguous
    partial_ptr,  # [token tiles, feature tiles, SPLIT_K, 64 * COLS] fp32
    arrivals_ptr,  # [token tiles * feature tiles] int32, 0 before and after; both None unsplit
    M,
    stride_xsm,
    stride_xsk,
    stride_wsn,
    N,
    K,
    stride_xm,
    stride_wn,
    COLS: gl.constexpr,  # tokens of a tile, 16, 32 or 64
    SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr,  # of 256 along K
    EVEN_K: gl.constexpr,  # K is a multiple of 256
):
    ROWS: gl.constexpr = 64
    BOX: gl.constexpr = 16
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32])
    ELEMENT: gl.constexpr = w_ptr.dtype.element_ty
    rings = (_half(STAGES, ROWS, COLS, ELEMENT), _half(STAGES, ROWS, COLS, ELEMENT))
    first_row, first_token = gl.program_id(0) * ROWS, gl.program_id(2) * COLS
    split = gl.program_id(1)
    steps = (K + 255) // 256
    first = steps * split // SPLIT_K
    own = steps * (split + 1) // SPLIT_K - first
    pointers = (x_ptr, w_ptr, x_scale_ptr, w_scale_ptr)
    strides = (stride_xm, stride_wn, stride_xsm, stride_xsk, stride_wsn)
    sources = _sources(pointers, strides, first_row, first_token, M, N, ROWS, COLS, BOX)
    sums = _sums(rings, sources, stride_xsk, first, own, K, M < 0, STAGES, EVEN_K, SUMS)
    finished = True
    if SPLIT_K > 1:
        tile = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
        columns = (M - first_token + BOX - 1) // BOX * BOX
        sums, finished = add_parts(
            sums, partial_ptr, arrivals_ptr, tile, split, columns, SPLIT_K, SUMS
        )
    if finished:
        sums = _with_bias(sums, bias_ptr, first_row, N, ROWS, SUMS)
        store_tokens(y_ptr, sums, M, N, first_row, first_token, BOX)
