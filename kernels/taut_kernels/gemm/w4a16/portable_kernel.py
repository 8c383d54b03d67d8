"""The Triton kernels of :mod:`.portable`.

Weights are operand A of `wgmma` from registers: each warp loads the words of its 16-row tiles in
fragment order, converts them (:mod:`.portable_ptx`), and a chain of joins
and permutations, a renaming of registers, makes the tensor `tl.dot` wants. Activations are
operand B, [BLOCK_M tokens] from shared memory. Lanes hold columns in an order of their own
(``formats_mma``), so columns of activations are loaded in that order too.

The Triton interpreter cannot run inline assembly: only a GPU runs this file.
"""

# ruff: noqa: RUF005, C901 (Triton's front end adds tuples and does not unpack them; a
# kernel is one function: its branches fall at compile time)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return,misc"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from taut_kernels.gemm.w4a16.portable_ptx import (
    WAIT_CONSTRAINTS,
    WAIT_PTX,
    convert_constraints,
    convert_ptx,
)
from taut_kernels.gemm.w4a16.zeros_jit import every_element, lane_axis, lane_pointers


@triton.jit
def convert_words(
    words,  # [WARPS · 128] int32
    quads,  # likewise: words of two scales, the quad of each lane's rows
    zeros,  # [WARPS · 32, 1]: the quad's zero points of each lane; unused without HAS_ZEROS
    index,  # [WARPS · 128] int32: the chunk's group within the quad
    ELEMENT: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    SAME_GROUP: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Convert one chunk of a row tile a warp to [WARPS, g, t, j, b, r, i, h]."""
    asm: tl.constexpr = convert_ptx(ELEMENT, HAS_ZEROS, SAME_GROUP)
    constraints: tl.constexpr = convert_constraints(HAS_ZEROS)
    operands = (words, quads)
    if HAS_ZEROS:
        operands = operands + (every_element(zeros),)
    operands = operands + (index,)
    if ELEMENT == "bf16":
        o = tl.inline_asm_elementwise(
            asm,
            constraints,
            operands,
            dtype=(
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
            ),
            is_pure=True,
            pack=4,
        )
    else:
        o = tl.inline_asm_elementwise(
            asm,
            constraints,
            operands,
            dtype=(
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
            ),
            is_pure=True,
            pack=4,
        )
    # Each join adds the innermost axis: r, then i, then h.
    first = tl.join(tl.join(o[0], o[1]), tl.join(o[2], o[3]))
    second = tl.join(tl.join(o[4], o[5]), tl.join(o[6], o[7]))
    return tl.reshape(tl.join(first, second), (WARPS, 8, 4, 2, 2, 2, 2, 2))


@triton.jit
def zero_pointers(zeros_ptr, first_tile, N, QUADS: tl.constexpr, WARPS: tl.constexpr):
    """Return pointers to each lane's zero points of the first quad: [WARPS · 32, 1] int32."""
    lane = lane_axis(WARPS)
    zero_tile = tl.minimum(first_tile + lane // 32, N // 16 - 1)
    return lane_pointers(zeros_ptr, zero_tile * QUADS, lane)


@triton.jit
def group_index(chunk, GROUP_SIZE: tl.constexpr, SIZE: tl.constexpr):
    """Return [SIZE] copies of the place of a chunk's group in its quad."""
    index = tl.full((SIZE,), 0, tl.int32)
    if GROUP_SIZE:
        index += (chunk * 64 // GROUP_SIZE) % 4
    return index


@triton.jit
def fragment_columns(position):
    """Return the column of activations that meets MMA position ``position`` (h, i, j, t, b)."""
    column = (position // 32) * 32 + ((position // 2) % 4) * 8
    return column + ((position // 16) % 2) * 4 + ((position // 8) % 2) * 2 + position % 2


@triton.jit
def reorder_kernel(
    x_ptr,  # [M, K], stride_xk = 1
    out_ptr,  # [M, K], contiguous: columns in fragment order
    K,
    stride_xm,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Bring the columns of activations into fragment order, so that tiles load 16 bytes a lane."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = position < K
    value = tl.load(x_ptr + row * stride_xm + fragment_columns(position), mask=mask)
    tl.store(out_ptr + row * K + position, value, mask=mask)


STAGES: tl.constexpr = tl.constexpr(3)
"""Depth of the software pipeline."""
PREFETCH_CHUNKS: tl.constexpr = tl.constexpr(4)
"""Chunks brought into L2 before the activations are there: two steps, 2 KB a row tile."""


@triton.jit
def _prefetch(ptrs):
    """Bring the lines of four neighbouring words a lane into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$4]; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l",
        (ptrs.to(tl.int64),),
        dtype=tl.int32,
        is_pure=False,
        pack=4,
    )


@triton.jit
def _store_tile(y_ptr, bias_ptr, acc, rows, token, M, N, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows, mask=rows < N, other=0).to(tl.float32)[:, None]
    pointers = y_ptr + token[None, :].to(tl.int64) * N + rows[:, None]
    mask = (token[None, :] < M) & (rows[:, None] < N)
    tl.store(pointers, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_splits(
    acc, rows, token, tile_of_y, split, partial_ptr, arrivals_ptr, y_ptr, bias_ptr, M, N,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """Leave a split's sums; add all splits' up and store them in the program that arrives last."""
    SIZE: tl.constexpr = ROWS * BLOCK_M
    cell = tl.arange(0, ROWS)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    cells = partial_ptr + tile_of_y.to(tl.int64) * (SPLIT_K * SIZE) + cell
    tl.store(cells + split * SIZE, acc)
    # Every thread's partials are stored before one of them announces the program.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + tile_of_y, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLIT_K - 1:
        total = tl.zeros((ROWS, BLOCK_M), tl.float32)
        for s in tl.range(SPLIT_K):
            # In order of the splits: the same bits from run to run. Past L1, which does not
            # see what other programs store.
            total += tl.load(cells + s * SIZE, cache_modifier=".cg")
        _store_tile(y_ptr, bias_ptr, total, rows, token, M, N, HAS_BIAS)
        tl.store(arrivals_ptr + tile_of_y, 0)


@triton.jit
def _columns(WIDTH: tl.constexpr, REORDERED: tl.constexpr):
    """Return which columns of activations a step meets, in the order of fragments."""
    column = tl.arange(0, WIDTH)
    if not REORDERED:
        column = tl.max_contiguous(tl.multiple_of(fragment_columns(column), 2), 2)
    return column


@triton.jit
def _load_quads(quad_ptrs, zero_ptrs, quad, HAS_ZEROS: tl.constexpr):
    """Load a quad's scales and its zero points; the scales again where there are none."""
    quads = tl.load(quad_ptrs + quad * 32)
    zeros = quads
    if HAS_ZEROS:
        zeros = tl.load(zero_ptrs + quad * 8)
    return quads, zeros


@triton.jit
def _used(acc):
    return tl.inline_asm_elementwise("", "=f,0", (acc,), dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _rows_of(words, quads, zeros, chunk, GROUP_SIZE: tl.constexpr, ELEMENT: tl.constexpr,
             HAS_ZEROS: tl.constexpr, WARPS: tl.constexpr):  # fmt: skip
    """Convert a chunk to [rows, 64]."""
    index = group_index(chunk, GROUP_SIZE, WARPS * 128)
    same: tl.constexpr = GROUP_SIZE != 32
    part = convert_words(words, quads, zeros, index, ELEMENT, HAS_ZEROS, same, WARPS)
    # warp, r, g are the row; h, i, j, t, b the position along K.
    part = tl.permute(part, (0, 5, 1, 7, 6, 3, 2, 4))
    return tl.reshape(part, (WARPS * 16, 64))


@triton.jit
def _side_by_side(parts, ROWS: tl.constexpr):
    """Return one or two chunks as one matrix."""
    weight = parts[0]
    if len(parts) == 2:
        weight = tl.permute(tl.join(parts[0], parts[1]), (0, 2, 1))
        weight = tl.reshape(weight, (ROWS, 128))
    return weight


@triton.jit(do_not_specialize=["M"])
def w4a16_wgmma_kernel(
    x_ptr, qweight_ptr, scales_ptr, zeros_ptr, bias_ptr, y_ptr, partial_ptr, arrivals_ptr,
    M, N, stride_xm, K: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr, ELEMENT: tl.constexpr,
    CUT: tl.constexpr,  # of :mod:`.portable_tile`
    PDL: tl.constexpr,  # start before the kernel in front has ended (sm_90)
):  # fmt: skip
    """Operands as of :func:`.ring_kernel.w4a16_wgmma_ring_kernel`.

    But x is in fragment order if the tile is ``reordered``, and partial is [tiles of y, SPLIT_K,
    rows, BLOCK_M].
    """
    BLOCK_M: tl.constexpr = CUT.block_m
    CHUNKS_PER_STEP: tl.constexpr = CUT.chunks_per_step
    SPLIT_K: tl.constexpr = CUT.split_k
    WARPS: tl.constexpr = CUT.warps
    CHUNKS: tl.constexpr = K // 64
    QUADS: tl.constexpr = (K // GROUP_SIZE + 3) // 4 if GROUP_SIZE else 1
    ROWS: tl.constexpr = WARPS * 16

    if PDL:
        gdc_launch_dependents()
    pid, split, pid_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    element = tl.arange(0, WARPS * 128)
    # A program's spare row tiles repeat the last one; what they compute is not stored.
    tile = tl.minimum(pid * WARPS + element // 128, N // 16 - 1)
    lane_element = element % 128
    word_offsets = tile * (CHUNKS * 128) + lane_element
    word_ptrs = qweight_ptr + tl.max_contiguous(tl.multiple_of(word_offsets, 4), 4)
    quad_offsets = tile * (QUADS * 32) + (lane_element // 16) * 4 + lane_element % 4
    quad_offsets = tl.max_contiguous(tl.multiple_of(quad_offsets, 4), 4)
    quad_ptrs = scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + quad_offsets
    zero_ptrs = quad_ptrs
    if HAS_ZEROS:
        zero_ptrs = zero_pointers(zeros_ptr, pid * WARPS, N, QUADS, WARPS)

    column = _columns(64 * CHUNKS_PER_STEP, CUT.reordered)
    token = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    # Tokens beyond M read the first ones again: no mask, never stored. Not all the last one:
    # every multiprocessor would ask one place of L2 for one line, 128 times a step.
    token_row = (token % M).to(tl.int64)
    x_ptrs = x_ptr + token_row[:, None] * stride_xm + column[None, :]

    STEPS: tl.constexpr = (CHUNKS // CHUNKS_PER_STEP + SPLIT_K - 1) // SPLIT_K
    first = split * STEPS
    last = tl.minimum(first + STEPS, CHUNKS // CHUNKS_PER_STEP)
    quad = 0
    if GROUP_SIZE:
        quad = tl.minimum(first * (64 * CHUNKS_PER_STEP) // GROUP_SIZE // 4, QUADS - 1)
    quads, zeros = _load_quads(quad_ptrs, zero_ptrs, quad, HAS_ZEROS)
    if PDL:
        for c in tl.static_range(PREFETCH_CHUNKS):
            _prefetch(word_ptrs + (first * CHUNKS_PER_STEP + c) * 128)
        # The first weights, which nobody writes while serving, are on their way: now wait for the
        # kernel that makes the activations (and the one that used arrivals and partial before).
        gdc_wait()
    acc = tl.zeros((ROWS, BLOCK_M), tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        chunk = step * CHUNKS_PER_STEP
        x = tl.load(x_ptrs + chunk * 64)
        # Carried, so that the pipeliner leaves them in registers, one step ahead.
        next_quads = quads
        next_zeros = zeros
        if GROUP_SIZE:
            quad = tl.minimum((chunk + CHUNKS_PER_STEP) * 64 // GROUP_SIZE // 4, QUADS - 1)
            next_quads = tl.load(quad_ptrs + quad * 32)
            if HAS_ZEROS:
                next_zeros = tl.load(zero_ptrs + quad * 8)
        parts = ()
        for c in tl.static_range(CHUNKS_PER_STEP):
            words = tl.load(word_ptrs + (chunk + c) * 128, eviction_policy="evict_first")
            if CUT.early_wait:
                # The products of the step before still read the registers that the conversion is
                # about to write, and Triton 3.6 and 3.9 do not wait for them (README).
                words = tl.inline_asm_elementwise(
                    WAIT_PTX, WAIT_CONSTRAINTS, (words,), dtype=tl.int32, is_pure=False, pack=4
                )
            part = _rows_of(words, quads, zeros, chunk + c, GROUP_SIZE, ELEMENT, HAS_ZEROS, WARPS)
            parts = parts + (part,)
        weight = _side_by_side(parts, ROWS)
        acc = tl.dot(weight, x.T, acc)
        if not CUT.early_wait:
            # A use that is no product makes Triton wait for the products at the end of the step.
            acc = _used(acc)
        quads = next_quads
        zeros = next_zeros

    rows = pid * ROWS + tl.arange(0, ROWS)
    if SPLIT_K == 1:
        _store_tile(y_ptr, bias_ptr, acc, rows, token, M, N, HAS_BIAS)
    else:
        _add_splits(
            acc, rows, token, pid_m * tl.num_programs(0) + pid, split, partial_ptr, arrivals_ptr,
            y_ptr, bias_ptr, M, N, HAS_BIAS, ROWS, BLOCK_M, SPLIT_K,
        )  # fmt: skip
