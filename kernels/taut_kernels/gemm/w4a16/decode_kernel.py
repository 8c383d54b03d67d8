"""The Triton kernel of :mod:`.decode`.

Every tensor is 1-D with four elements a lane (``WARPS * 128``), so that `tl.inline_asm_elementwise`
sees registers of `mma.m16n8k16` fragments and nothing in the loop changes layout. Weights and
activations of the chunks ahead wait in registers, in tuples used as queues. Warps share the rows of
a program, its K indices, or both; programs may share K too (SPLIT_K).

The Triton interpreter cannot run inline assembly: only a GPU runs this file.
"""

# ruff: noqa: RUF005 (Triton's front end adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from taut_kernels.gemm.w4a16.decode_ptx import FENCE_CONSTRAINTS, FENCE_PTX
from taut_kernels.gemm.w4a16.decode_unit_jit import (
    add_scaled,
    load_activations,
    load_quads,
    load_weights,
    multiply_unit,
    zero_accumulators,
)
from taut_kernels.gemm.w4a16.zeros_jit import lane_axis, lane_pointers


@triton.jit
def _store_rows(
    y_ptr, bias_ptr, value, tile, token_tile, lane_element, M, N, HAS_BIAS: tl.constexpr
):
    """Store one 16-row × 8-token accumulator tile where fragments put their elements."""
    row = tile * 16 + lane_element // 16 + 8 * ((lane_element % 4) // 2)
    token = token_tile * 8 + 2 * ((lane_element // 4) % 4) + lane_element % 2
    if HAS_BIAS:
        value += tl.load(bias_ptr + row).to(tl.float32)
    tl.store(y_ptr + token * N + row, value.to(y_ptr.dtype.element_ty), mask=token < M)


@triton.jit
def _reduce_and_store(
    totals, y_ptr, bias_ptr, partial_ptr, arrivals_ptr, M, N, HAS_BIAS: tl.constexpr,
    TOKEN_TILES: tl.constexpr, ROW_WARPS: tl.constexpr, K_WARPS: tl.constexpr,
    SPLIT_K: tl.constexpr,
):  # fmt: skip
    """Add the K-warps' totals, then the splits' in the program that arrives last, and store."""
    pid, split = tl.program_id(0), tl.program_id(1)
    # ROW_WARPS · 128 elements are left, four a lane as before.
    out = tl.arange(0, ROW_WARPS * 128)
    lane_element = out % 128
    tile = tl.minimum(pid * ROW_WARPS + out // 128, N // 16 - 1)
    first_partial = pid * SPLIT_K * TOKEN_TILES * ROW_WARPS * 128 + out
    for i in tl.static_range(TOKEN_TILES):
        value = totals[i]
        if K_WARPS > 1:
            value = tl.sum(tl.reshape(value, (K_WARPS, ROW_WARPS * 128)), axis=0)
        if SPLIT_K == 1:
            _store_rows(y_ptr, bias_ptr, value, tile, i, lane_element, M, N, HAS_BIAS)
        else:
            tl.store(
                partial_ptr + first_partial + (split * TOKEN_TILES + i) * ROW_WARPS * 128, value
            )
    if SPLIT_K > 1:
        # Every thread's partials are stored before one of them announces the program.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + pid, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT_K - 1:
            for i in tl.static_range(TOKEN_TILES):
                value = tl.zeros((ROW_WARPS * 128,), tl.float32)
                for s in tl.static_range(SPLIT_K):
                    # In order of the splits: the same bits from run to run. Past L1, which does
                    # not see what other programs store.
                    value += tl.load(
                        partial_ptr + first_partial + (s * TOKEN_TILES + i) * ROW_WARPS * 128,
                        cache_modifier=".cg",
                    )
                _store_rows(y_ptr, bias_ptr, value, tile, i, lane_element, M, N, HAS_BIAS)
            tl.store(arrivals_ptr + pid, 0)


@triton.jit
def _places(warp, N, STEPS: tl.constexpr, ROW_WARPS: tl.constexpr, K_WARPS: tl.constexpr):
    """Return each warp's row tile and first unit.

    A program's spare row tiles repeat the last one: two warps then store equal values.
    """
    tile = tl.minimum(tl.program_id(0) * ROW_WARPS + warp % ROW_WARPS, N // 16 - 1)
    return tile, tl.program_id(1) * K_WARPS * STEPS + warp // ROW_WARPS


@triton.jit
def _token_pointers(x_words, FIRST: tl.constexpr, lane_element, unit, M, stride_xm):
    """Return where each lane's words of one of eight tokens begin.

    Columns beyond M read the last token again: no traffic, no mask, never stored.
    """
    token = tl.minimum(lane_element // 16 + FIRST, M - 1).to(tl.int64)
    offsets = token * (stride_xm // 2) + unit * 256 + lane_element % 16
    return x_words + tl.max_contiguous(tl.multiple_of(offsets, 4), 4)


@triton.jit
def _load_scales(pointers, first, ahead, QUADS: tl.constexpr, ALL_QUADS: tl.constexpr,
                 HAS_ZEROS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Load scales and zero points of a unit so many quads ahead; without zeros, scales twice."""
    scales = load_quads(pointers[0] + ahead * 32, first[0] + ahead, QUADS, ALL_QUADS, 32, MASKED)
    zeros = scales
    if HAS_ZEROS:
        zeros = load_quads(pointers[1] + ahead * 8, first[1] + ahead, QUADS, ALL_QUADS, 8, MASKED)
    return scales, zeros


@triton.jit(do_not_specialize=["M"])
def w4a16_decode_kernel(
    x_ptr,  # [M, K], rows 16-byte aligned, stride_xk = 1
    qweight_ptr,  # [N/16, K/64, 32, 4] int32
    scales_ptr,  # [N/16, quads, 8, 4, 2], read as words of two
    zeros_ptr,  # [N/16, quads, 8] int32; unused without HAS_ZEROS
    bias_ptr,  # [N]; unused without HAS_BIAS
    y_ptr,  # [M, N], contiguous
    partial_ptr,  # [programs, SPLIT_K, TOKEN_TILES, ROW_WARPS · 128] fp32
    arrivals_ptr,  # [programs] int32, 0 before and after; both unused with SPLIT_K = 1
    M,
    N,
    stride_xm,
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # 32, 64, 128, or 0 for one group a channel
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ELEMENT: tl.constexpr,  # "bf16" or "f16"
    CUT: tl.constexpr,  # of :mod:`.decode_tile`
    PDL: tl.constexpr,  # start before the kernel in front has ended (sm_90)
):
    TOKEN_TILES: tl.constexpr = CUT.token_tiles
    ROW_WARPS: tl.constexpr = CUT.row_warps
    K_WARPS: tl.constexpr = CUT.k_warps
    SPLIT_K: tl.constexpr = CUT.split_k
    DEPTH: tl.constexpr = CUT.depth
    X_DEPTH: tl.constexpr = CUT.x_depth
    WARPS: tl.constexpr = ROW_WARPS * K_WARPS
    CHUNKS: tl.constexpr = K // 64
    STEPS: tl.constexpr = (CHUNKS + 8 * K_WARPS * SPLIT_K - 1) // (8 * K_WARPS * SPLIT_K)
    LAST: tl.constexpr = STEPS - 1
    MASKED: tl.constexpr = CHUNKS != 8 * K_WARPS * SPLIT_K * STEPS
    GROUPS: tl.constexpr = K // GROUP_SIZE if GROUP_SIZE else 1
    ALL_QUADS: tl.constexpr = (GROUPS + 3) // 4
    QUADS: tl.constexpr = 128 // GROUP_SIZE if GROUP_SIZE else 1
    UNIT_QUADS: tl.constexpr = QUADS if GROUP_SIZE else 0

    if PDL:
        gdc_launch_dependents()
    element = tl.arange(0, WARPS * 128)
    lane_element = element % 128
    tile, unit = _places(element // 128, N, STEPS, ROW_WARPS, K_WARPS)

    word_offsets = (tile * CHUNKS + unit * 8) * 128 + lane_element
    word_ptrs = qweight_ptr + tl.max_contiguous(tl.multiple_of(word_offsets, 4), 4)
    quad_offsets = (tile * ALL_QUADS + unit * UNIT_QUADS) * 32
    quad_offsets += (lane_element // 16) * 4 + lane_element % 4
    quad_offsets = tl.max_contiguous(tl.multiple_of(quad_offsets, 4), 4)
    x_words = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    value_ptrs0 = _token_pointers(x_words, 0, lane_element, unit, M, stride_xm)
    value_ptrs1 = _token_pointers(x_words, 8, lane_element, unit, M, stride_xm)
    chunk = unit * 8

    quad_ptrs = scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + quad_offsets
    first_quad = unit * UNIT_QUADS
    zero_ptrs, first_zeros = quad_ptrs, first_quad
    if HAS_ZEROS:
        lane = lane_axis(WARPS)
        zero_tile, zero_unit = _places(lane // 32, N, STEPS, ROW_WARPS, K_WARPS)
        first_zeros = zero_unit * UNIT_QUADS
        zero_ptrs = lane_pointers(zeros_ptr, zero_tile * ALL_QUADS + first_zeros, lane)
    word_queue, value_queue = (), ()
    for c in tl.static_range(DEPTH):
        words = load_weights(word_ptrs + c * 128, chunk + c < CHUNKS, MASKED)
        word_queue = word_queue + (words,)
    scales, zeros = _load_scales(
        (quad_ptrs, zero_ptrs), (first_quad, first_zeros), 0, QUADS, ALL_QUADS, HAS_ZEROS, MASKED
    )
    if PDL:
        # The first weights, which nobody writes while serving, are on their way: now wait for the
        # kernel that makes the activations (and the one that used arrivals and partial before).
        gdc_wait()
    for c in tl.static_range(X_DEPTH):
        values = load_activations(
            value_ptrs0 + c * 32, value_ptrs1 + c * 32, chunk + c < CHUNKS, TOKEN_TILES, MASKED
        )
        value_queue = value_queue + (values,)
    totals = zero_accumulators(TOKEN_TILES, WARPS * 128)
    sums = () if GROUP_SIZE else totals
    if CUT.fence:
        tl.inline_asm_elementwise(
            FENCE_PTX, FENCE_CONSTRAINTS, (chunk,), dtype=tl.int32, is_pure=False, pack=4
        )

    # Pointers stay outside the loop and steps are added to them: Triton 3.6 gives carried pointers
    # another layout behind the loop and converts them, through shared memory, for every load.
    for step in tl.range(LAST):
        next_scales, next_zeros = scales, zeros
        if GROUP_SIZE:
            next_scales, next_zeros = _load_scales(
                (quad_ptrs, zero_ptrs), (first_quad, first_zeros), (step + 1) * K_WARPS * QUADS,
                QUADS, ALL_QUADS, HAS_ZEROS, MASKED,
            )  # fmt: skip
        word_queue, value_queue, sums, totals = multiply_unit(
            word_queue, value_queue, scales, zeros, sums, totals, word_ptrs + step * K_WARPS * 1024,
            value_ptrs0 + step * K_WARPS * 256, value_ptrs1 + step * K_WARPS * 256,
            chunk + step * K_WARPS * 8, CHUNKS, GROUP_SIZE, HAS_ZEROS, ELEMENT, MASKED, CUT, False,
        )  # fmt: skip
        scales, zeros = next_scales, next_zeros
    word_queue, value_queue, sums, totals = multiply_unit(
        word_queue, value_queue, scales, zeros, sums, totals, word_ptrs + LAST * K_WARPS * 1024,
        value_ptrs0 + LAST * K_WARPS * 256, value_ptrs1 + LAST * K_WARPS * 256,
        chunk + LAST * K_WARPS * 8, CHUNKS, GROUP_SIZE, HAS_ZEROS, ELEMENT, MASKED, CUT, True,
    )  # fmt: skip
    if GROUP_SIZE == 0:
        totals = add_scaled(scales[0], sums, totals, 0, ELEMENT)
    _reduce_and_store(
        totals, y_ptr, bias_ptr, partial_ptr, arrivals_ptr, M, N,
        HAS_BIAS, TOKEN_TILES, ROW_WARPS, K_WARPS, SPLIT_K,
    )  # fmt: skip
