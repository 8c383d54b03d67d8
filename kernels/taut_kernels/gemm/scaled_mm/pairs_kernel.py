"""The Gluon kernel of 8-bit products of at most some 64 tokens on sm_90, two blocks of K a step.

Weights are the row operand of `wgmma`, tokens its columns. Four warps copy both by `cp.async`, as
far ahead as a ring of shared memory has room; a step is two blocks of 128 along K, so that warps
meet once for 256. Programs that share a tile along K leave their parts in memory, and the last to
arrive adds them. FP8 with blocks of weights has a kernel of its own on the same ring
(:mod:`.blocks_pairs_kernel`).
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from taut_kernels.gemm.scaled_mm.few_kernel import store_tokens, token_of_column, vectors
from taut_kernels.gemm.scaled_mm.parts_jit import add_parts
from taut_kernels.gemm.scaled_mm.store_jit import scaled
from taut_kernels.hopper import barrier, copy, early_start


@gluon.jit
def make_ring(STAGES: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, ELEMENT: gl.constexpr):
    """Make the ring of one of a step's two blocks: tokens and weights.

    Memory of its own: between copies into one allocation Triton 3.6 puts a `bar.sync`.
    """
    BYTES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    x = gl.allocate_shared_memory(ELEMENT, [STAGES, COLS, 128], BYTES)
    w = gl.allocate_shared_memory(ELEMENT, [STAGES, ROWS, 128], BYTES)
    return x, w


@gluon.jit
def block_pointers(
    x_ptr, w_ptr, stride_xm, stride_wn, first_row, first_token, M, N,
    ROWS: gl.constexpr, COLS: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Return pointers to the first blocks of tokens and weights, and a mask of the tokens.

    Rows beyond N read the last one again; they are never stored. Tokens that do not exist are left
    out: one read by every column of every program is one place of L2 for all of them (of one token
    16 columns took 7.7 µs where 16 tokens take 6.3; FP8 with blocks, H200, 4096 × 4096).
    """
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    k = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, BYTES)), 0)
    # int64: M·stride and N·stride pass 2**31 on large layers.
    row = gl.minimum(first_row + gl.arange(0, ROWS, gl.SliceLayout(1, BYTES)), N - 1)
    w = w_ptr + (gl.expand_dims(gl.cast(row, gl.int64) * stride_wn, 1) + k)
    columns = gl.arange(0, COLS, gl.SliceLayout(1, BYTES))
    token = token_of_column(first_token, columns, M, BOX)
    x = x_ptr + (gl.expand_dims(gl.cast(token, gl.int64) * stride_xm, 1) + k)
    return x, w, gl.expand_dims(token < M, 1) & (k < 128)


@gluon.jit
def copy_blocks(ring, blocks, slot, first, K, EVEN_K: gl.constexpr):
    """Copy the blocks that begin at the ``first`` index of K into a ring; zeros beyond K."""
    x, w, there = blocks
    if EVEN_K:
        copy(ring[1].index(slot), w + first)
        copy(ring[0].index(slot), x + first, mask=there)
    else:
        BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
        inside = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, BYTES)), 0) < K - first
        copy(ring[1].index(slot), w + first, mask=inside)
        copy(ring[0].index(slot), x + first, mask=there & inside)


@gluon.jit
def start_early(
    w_ptr, stride_wn, first_row, N, first, K, ROWS: gl.constexpr, LINES: gl.constexpr
):  # fmt: skip
    """Bring the first LINES lines of 128 bytes of each row into L2, then wait for the inputs.

    As :func:`.portable_kernel.start_early`; ``first`` is the first index of K.
    """
    if LINES:
        W: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LINES, LINES], [4, 1], [1, 0])
        row = gl.minimum(first_row + gl.arange(0, ROWS, gl.SliceLayout(1, W)), N - 1)
        k = gl.minimum(first + gl.arange(0, LINES, gl.SliceLayout(0, W)) * 128, K - 1)
        places = gl.expand_dims(gl.cast(row, gl.int64) * stride_wn, 1) + gl.expand_dims(k, 0)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [gl.cast(w_ptr + places, gl.int64)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    early_start(False)
    early_start(True)


@gluon.jit
def share(K, SPLIT_K: gl.constexpr):
    """Return a program's first step and its steps."""
    steps = (K + 255) // 256
    split = gl.program_id(1)
    first = steps * split // SPLIT_K
    return first, steps * (split + 1) // SPLIT_K - first


@gluon.jit
def sum_of_parts(
    sums, partial_ptr, arrivals_ptr, M, first_token,
    BOX: gl.constexpr, SPLIT_K: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Return (a tile's sums, True), in the last of the programs that share it where some do."""
    finished = True
    if SPLIT_K > 1:
        tile = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
        columns = (M - first_token + BOX - 1) // BOX * BOX
        sums, finished = add_parts(
            sums, partial_ptr, arrivals_ptr, tile, gl.program_id(1), columns, SPLIT_K, SUMS
        )
    return sums, finished


@gluon.jit
def _ask(rings, blocks, slot, step, K, EVEN_K: gl.constexpr):
    for half in gl.static_range(2):
        copy_blocks(rings[half], blocks, slot, step * 256 + half * 128, K, EVEN_K)


@gluon.jit
def _sums(
    rings, blocks, first, own, K,
    STAGES: gl.constexpr, EVEN_K: gl.constexpr, ACC: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Return the sums [features, tokens] over ``own`` steps, the ``first`` and following."""
    AHEAD: gl.constexpr = STAGES - 1
    ROWS: gl.constexpr = rings[0][1].shape[1]
    COLS: gl.constexpr = rings[0][0].shape[1]
    for i in gl.static_range(AHEAD):
        if i < own:
            _ask(rings, blocks, i, first + i, K, EVEN_K)
        async_copy.commit_group()
    acc = gl.zeros([ROWS, COLS], ACC, SUMS)
    for i in range(own):
        async_copy.wait_group(AHEAD - 1)
        # Everybody's copies are there, and nobody reads the step before any more. No fence between
        # proxies, as in Triton's own rings of `cp.async` in front of `wgmma`.
        barrier()
        slot = i % STAGES
        for half in gl.static_range(2):
            columns = rings[half][0].index(slot).permute([1, 0])
            acc = hopper.warpgroup_mma(rings[half][1].index(slot), columns, acc, is_async=True)
        if i + AHEAD < own:
            _ask(rings, blocks, (i + AHEAD) % STAGES, first + i + AHEAD, K, EVEN_K)
        async_copy.commit_group()
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)
    return acc


@gluon.jit(do_not_specialize=["M", "stride_xs", "stride_ws"])
def scaled_mm_pairs_kernel(
    x_ptr,  # [M, K] int8 or e4m3, stride_xk = 1
    w_ptr,  # [N, K] as x, stride_wk = 1; the next ones as of `scaled_mm_few_kernel`
    x_scale_ptr, w_scale_ptr, azp_adj_ptr, azp_ptr, bias_ptr, y_ptr, partial_ptr, arrivals_ptr,
    M, stride_xs, stride_ws, N, K, stride_xm, stride_wn,
    ROWS: gl.constexpr,  # features of a tile, 64, or unsplit 128 or 256
    COLS: gl.constexpr,  # tokens of a tile, 16, 32 or 64
    SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr,  # of 256 along K
    EVEN_K: gl.constexpr,  # K is a multiple of 256
    EARLY: gl.constexpr,  # programmatic dependent launch
    PREFETCH: gl.constexpr,  # with EARLY: lines of each row asked for before the inputs are there
):  # fmt: skip
    BOX: gl.constexpr = 16
    ELEMENT: gl.constexpr = w_ptr.dtype.element_ty
    ACC: gl.constexpr = gl.int32 if w_ptr.dtype.element_ty == gl.int8 else gl.float32
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32])
    rings = (make_ring(STAGES, ROWS, COLS, ELEMENT), make_ring(STAGES, ROWS, COLS, ELEMENT))
    first_row, first_token = gl.program_id(0) * ROWS, gl.program_id(2) * COLS
    first, own = share(K, SPLIT_K)
    blocks = block_pointers(
        x_ptr, w_ptr, stride_xm, stride_wn, first_row, first_token, M, N, ROWS, COLS, BOX
    )
    if EARLY:
        start_early(w_ptr, stride_wn, first_row, N, first * 256, K, ROWS, PREFETCH)
    pointers = (x_scale_ptr, w_scale_ptr, azp_adj_ptr, azp_ptr, bias_ptr)
    strides = (stride_xs, stride_ws)
    # Asked for before the products, used behind them.
    found = vectors(pointers, strides, first_row, first_token, M, N, ROWS, COLS, BOX, SUMS)
    acc = _sums(rings, blocks, first, own, K, STAGES, EVEN_K, ACC, SUMS)
    acc, finished = sum_of_parts(acc, partial_ptr, arrivals_ptr, M, first_token, BOX, SPLIT_K, SUMS)
    if finished:
        values = scaled(acc, pointers, found, SUMS, 1)
        store_tokens(y_ptr, values, M, N, first_row, first_token, BOX)
