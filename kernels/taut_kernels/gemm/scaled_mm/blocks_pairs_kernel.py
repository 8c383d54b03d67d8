"""The Gluon kernel of FP8 products with 128 × 128 blocks of weights, for few tokens on sm_90.

The ring of :mod:`.pairs_kernel`, on which scales travel beside the blocks:
whoever waits for a step has all of it. (In :mod:`.blocks_portable_kernel`, Triton's own
ring, nothing can bring scales along.) A step is two blocks of K, two products: one is scaled while
the other multiplies.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from taut_kernels.gemm.scaled_mm.few_kernel import store_tokens, token_of_column
from taut_kernels.gemm.scaled_mm.pairs_kernel import (
    block_pointers,
    copy_blocks,
    make_ring,
    share,
    start_early,
    sum_of_parts,
)
from taut_kernels.hopper import barrier, copy


@gluon.jit
def _scale_pointers(
    x_scale_ptr, w_scale_ptr, stride_xsm, stride_wsn, first_row, first_token, M,
    COLS: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Return pointers to a tile's first scales: its tokens' and, of one element, its weights'."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # Tokens beyond the last read its scale again, four bytes each.
    token = gl.minimum(token_of_column(first_token, gl.arange(0, COLS, LINE), M, BOX), M - 1)
    x_scale = x_scale_ptr + gl.cast(token, gl.int64) * stride_xsm
    return x_scale, w_scale_ptr + (first_row // 128 * stride_wsn + gl.arange(0, 1, LINE))


@gluon.jit
def _make_scales(STAGES: gl.constexpr, COLS: gl.constexpr):
    """Make what lies beside one of a step's two blocks: its tokens' scales, its weights' one."""
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_scale = gl.allocate_shared_memory(gl.float32, [STAGES, COLS], LINE)
    return x_scale, gl.allocate_shared_memory(gl.float32, [STAGES, 1], LINE)


@gluon.jit
def _ask(rings, blocks, scales, stride_xsk, slot, step, K, EVEN_K: gl.constexpr):
    """Copy a step's blocks and scales into the rings; zeros beyond K."""
    for half in gl.static_range(2):
        group = step * 2 + half
        copy_blocks(rings[half], blocks, slot, group * 128, K, EVEN_K)
        if not EVEN_K:
            # The second half may have no block of its own: zeros times the last one's scales.
            group = gl.minimum(group, (K + 127) // 128 - 1)
        copy(rings[2 + half][0].index(slot), scales[0] + group * stride_xsk)
        copy(rings[2 + half][1].index(slot), scales[1] + group)


@gluon.jit
def _begin(ring, slot, product, never):
    """Begin the product of a block in the registers of a former one."""
    columns = ring[0].index(slot).permute([1, 0])
    return hopper.warpgroup_mma(ring[1].index(slot), columns, product, use_acc=never, is_async=True)


@gluon.jit
def _factors(scales, slot, SUMS: gl.constexpr):
    """Read what scales a block's product: its tokens' scales times the weights' one."""
    TOKENS: gl.constexpr = gl.SliceLayout(0, SUMS)
    return scales[0].index(slot).load(TOKENS) * scales[1].index(slot).load(TOKENS)


@gluon.jit
def _add(sums, product, factors, RUNNING: gl.constexpr):
    """Add a finished product times its factors; here, and not behind the next wait.

    ``RUNNING`` products are under way. See :mod:`.blocks_step_jit`.
    """
    sums += product * gl.expand_dims(factors, 0)
    return hopper.warpgroup_mma_wait(RUNNING, deps=[sums])


@gluon.jit
def _sums(
    rings, blocks, scales, stride_xsk, first, own, K, never,
    STAGES: gl.constexpr, EVEN_K: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Return the scaled sums [features, tokens] over ``own`` steps, the ``first`` and following."""
    AHEAD: gl.constexpr = STAGES - 1
    ROWS: gl.constexpr = rings[0][1].shape[1]
    COLS: gl.constexpr = rings[0][0].shape[1]
    for i in gl.static_range(AHEAD):
        if i < own:
            _ask(rings, blocks, scales, stride_xsk, i, first + i, K, EVEN_K)
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
        first_half, second_half = _factors(rings[2], slot, SUMS), _factors(rings[3], slot, SUMS)
        even = _begin(rings[0], slot, even, never)
        odd = _begin(rings[1], slot, odd, never)
        if i + AHEAD < own:
            slot_ahead, step = (i + AHEAD) % STAGES, first + i + AHEAD
            _ask(rings, blocks, scales, stride_xsk, slot_ahead, step, K, EVEN_K)
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
def fp8_block_pairs_kernel(
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
    ROWS: gl.constexpr,  # features of a tile, 64, or unsplit 128
    COLS: gl.constexpr,  # tokens of a tile, 16, 32 or, of 64 features, 64
    SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr,  # of 256 along K
    EVEN_K: gl.constexpr,  # K is a multiple of 256
    EARLY: gl.constexpr,  # as in scaled_mm_pairs_kernel
    PREFETCH: gl.constexpr,
):
    BOX: gl.constexpr = 16
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32])
    ELEMENT: gl.constexpr = w_ptr.dtype.element_ty
    rings = (
        make_ring(STAGES, ROWS, COLS, ELEMENT), make_ring(STAGES, ROWS, COLS, ELEMENT),
        _make_scales(STAGES, COLS), _make_scales(STAGES, COLS),
    )  # fmt: skip
    first_row, first_token = gl.program_id(0) * ROWS, gl.program_id(2) * COLS
    first, own = share(K, SPLIT_K)
    blocks = block_pointers(
        x_ptr, w_ptr, stride_xm, stride_wn, first_row, first_token, M, N, ROWS, COLS, BOX
    )
    scales = _scale_pointers(
        x_scale_ptr, w_scale_ptr, stride_xsm, stride_wsn, first_row, first_token, M, COLS, BOX
    )
    if EARLY:
        start_early(w_ptr, stride_wn, first_row, N, first * 256, K, ROWS, PREFETCH)
    sums = _sums(rings, blocks, scales, stride_xsk, first, own, K, M < 0, STAGES, EVEN_K, SUMS)
    sums, finished = sum_of_parts(
        sums, partial_ptr, arrivals_ptr, M, first_token, BOX, SPLIT_K, SUMS
    )
    if finished:
        sums = _with_bias(sums, bias_ptr, first_row, N, ROWS, SUMS)
        store_tokens(y_ptr, sums, M, N, first_row, first_token, BOX)
