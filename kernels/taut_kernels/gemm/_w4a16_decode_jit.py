"""The Triton kernel of :mod:`taut_kernels.gemm.w4a16_decode`, and nothing else.

A *unit* of work is 16 output rows × 512 K indices: 8 *chunks* of 64, each one 16-byte load a lane.
Every tensor is 1-D with four elements a lane (``WARPS * 128``), so that `tl.inline_asm_elementwise`
sees registers of `mma.m16n8k16` fragments and nothing in the loop changes layout. Weights and
activations of the chunks ahead wait in registers, in tuples used as queues.

The Triton interpreter cannot run inline assembly: only a GPU runs this file.
"""

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.gemm._w4a16_decode_ptx import (
    FENCE_CONSTRAINTS,
    FENCE_PTX,
    SCALE_CONSTRAINTS,
    multiply_constraints,
    multiply_ptx,
    scale_ptx,
)


@triton.jit  # type: ignore[untyped-decorator]
def _load_weights(ptrs, mask, ROW_TILES: tl.constexpr, MASKED: tl.constexpr, ROW_TILE_WORDS):  # type: ignore[no-untyped-def]
    """Load one chunk of each row tile: a tuple of ROW_TILES tensors."""
    words = ()
    for r in tl.static_range(ROW_TILES):
        if MASKED:
            word = tl.load(
                ptrs + r * ROW_TILE_WORDS, mask=mask, other=0, eviction_policy="evict_first"
            )
        else:
            word = tl.load(ptrs + r * ROW_TILE_WORDS, eviction_policy="evict_first")
        words = words + (word,)
    return words


@triton.jit  # type: ignore[untyped-decorator]
def _load_activations(ptrs0, ptrs1, mask, TOKEN_TILES: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load one chunk of activations: both halves of each token tile, halves outermost."""
    values = ()
    for half in tl.static_range(2):
        for tile in tl.static_range(TOKEN_TILES):
            ptrs = (ptrs0 if tile == 0 else ptrs1) + half * 16
            if MASKED:
                value = tl.load(ptrs, mask=mask, other=0, eviction_policy="evict_last")
            else:
                value = tl.load(ptrs, eviction_policy="evict_last")
            values = values + (value,)
    return values


@triton.jit  # type: ignore[untyped-decorator]
def _load_quads(ptrs, mask, ROW_TILES: tl.constexpr, QUADS: tl.constexpr, MASKED: tl.constexpr, ROW_TILE_WORDS):  # type: ignore[no-untyped-def] # fmt: skip
    """Load a unit's scales (or zero points), four groups a tensor: row tiles outermost."""
    quads = ()
    for r in tl.static_range(ROW_TILES):
        for q in tl.static_range(QUADS):
            if MASKED:
                quad = tl.load(ptrs + r * ROW_TILE_WORDS + q * 32, mask=mask, other=0)
            else:
                quad = tl.load(ptrs + r * ROW_TILE_WORDS + q * 32)
            quads = quads + (quad,)
    return quads


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(words, values, zeros, sums, HALF: tl.constexpr, TOKEN_TILES: tl.constexpr, ZERO_INDEX: tl.constexpr, HAS_ZEROS: tl.constexpr, ELEMENT: tl.constexpr):  # type: ignore[no-untyped-def] # fmt: skip
    """Add 32 K indices of one row tile to ``sums``, a tuple of TOKEN_TILES accumulators."""
    operands = (words,)
    for tile in tl.static_range(TOKEN_TILES):
        operands = operands + (values[HALF * TOKEN_TILES + tile],)
    if HAS_ZEROS:
        operands = operands + (zeros,)
    asm: tl.constexpr = multiply_ptx(ELEMENT, HALF, TOKEN_TILES, ZERO_INDEX, HAS_ZEROS)
    constraints: tl.constexpr = multiply_constraints(TOKEN_TILES, HAS_ZEROS)
    if TOKEN_TILES == 1:
        result = (
            tl.inline_asm_elementwise(
                asm, constraints, operands + sums, dtype=tl.float32, is_pure=True, pack=4
            ),
        )
    else:
        result = tl.inline_asm_elementwise(
            asm, constraints, operands + sums, dtype=(tl.float32, tl.float32), is_pure=True, pack=4
        )
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _add_scaled(scales, sums, totals, INDEX: tl.constexpr, ELEMENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return ``totals + scale * sums`` for one row tile, in fp32."""
    asm: tl.constexpr = scale_ptx(ELEMENT, INDEX)
    result = ()
    for tile in tl.static_range(len(sums)):
        total = tl.inline_asm_elementwise(
            asm,
            SCALE_CONSTRAINTS,
            (scales, sums[tile], totals[tile]),
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
        result = result + (total,)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _unit(  # type: ignore[no-untyped-def]
    word_queue,  # loaded chunks ahead, each a tuple of ROW_TILES
    value_queue,  # likewise activations
    scales,  # this unit's, ROW_TILES × QUADS
    zeros,
    sums,  # running sums of the open group, ROW_TILES × TOKEN_TILES
    totals,  # scaled sums of the closed groups
    word_ptrs,
    value_ptrs0,
    value_ptrs1,
    chunk,  # index of this unit's first chunk, a warp each
    num_chunks,
    ROW_TILES: tl.constexpr,
    TOKEN_TILES: tl.constexpr,
    K_WARPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # 0: one group a channel, scaled after the loop
    HAS_ZEROS: tl.constexpr,
    ELEMENT: tl.constexpr,
    MASKED: tl.constexpr,
    FENCE: tl.constexpr,
    LAST: tl.constexpr,
    ROW_TILE_WORDS,
):
    """Consume one unit, loading what follows it as registers fall free."""
    QUADS: tl.constexpr = 128 // GROUP_SIZE if GROUP_SIZE else 1
    DEPTH: tl.constexpr = len(word_queue)
    X_DEPTH: tl.constexpr = len(value_queue)
    for c in tl.static_range(8):
        words, values = word_queue[0], value_queue[0]
        word_queue, value_queue = word_queue[1:], value_queue[1:]
        for half in tl.static_range(2):
            k: tl.constexpr = 64 * c + 32 * half
            group: tl.constexpr = k // GROUP_SIZE if GROUP_SIZE else 0
            closes: tl.constexpr = GROUP_SIZE != 0 and (k + 32) % GROUP_SIZE == 0
            new_sums, new_totals = (), ()
            for r in tl.static_range(ROW_TILES):
                quad: tl.constexpr = r * QUADS + group // 4
                row = _multiply(
                    words[r],
                    values,
                    zeros[quad] if HAS_ZEROS else words[r],
                    sums[r * TOKEN_TILES : (r + 1) * TOKEN_TILES],
                    half,
                    TOKEN_TILES,
                    group % 4,
                    HAS_ZEROS,
                    ELEMENT,
                )
                total = totals[r * TOKEN_TILES : (r + 1) * TOKEN_TILES]
                if closes:
                    total = _add_scaled(scales[quad], row, total, group % 4, ELEMENT)
                    for tile in tl.static_range(TOKEN_TILES):
                        new_sums = new_sums + (tl.zeros_like(row[tile]),)
                else:
                    new_sums = new_sums + row
                new_totals = new_totals + total
            sums, totals = new_sums, new_totals
        # Chunks past this unit belong to the warp's next one, K_WARPS units further on.
        if not LAST or c + DEPTH < 8:
            ahead: tl.constexpr = c + DEPTH if c + DEPTH < 8 else c + DEPTH - 8 + 8 * K_WARPS
            word_queue = word_queue + (
                _load_weights(
                    word_ptrs + ahead * 128,
                    chunk + ahead < num_chunks,
                    ROW_TILES,
                    MASKED,
                    ROW_TILE_WORDS,
                ),
            )
        if not LAST or c + X_DEPTH < 8:
            x_ahead: tl.constexpr = c + X_DEPTH if c + X_DEPTH < 8 else c + X_DEPTH - 8 + 8 * K_WARPS
            value_queue = value_queue + (
                _load_activations(
                    value_ptrs0 + x_ahead * 32,
                    value_ptrs1 + x_ahead * 32,
                    chunk + x_ahead < num_chunks,
                    TOKEN_TILES,
                    MASKED,
                ),
            )
        if FENCE and not LAST:
            tl.inline_asm_elementwise(
                FENCE_PTX, FENCE_CONSTRAINTS, (chunk,), dtype=tl.int32, is_pure=False, pack=4
            )
    return word_queue, value_queue, sums, totals


@triton.jit  # type: ignore[untyped-decorator]
def _store_rows(y_ptr, bias_ptr, value, tile, token_tile, lane_element, M, N, HAS_BIAS: tl.constexpr):  # type: ignore[no-untyped-def] # fmt: skip
    """Store one 16-row × 8-token accumulator tile where fragments put their elements."""
    row = tile * 16 + lane_element // 16 + 8 * ((lane_element % 4) // 2)
    token = token_tile * 8 + 2 * ((lane_element // 4) % 4) + lane_element % 2
    if HAS_BIAS:
        value += tl.load(bias_ptr + row).to(tl.float32)
    tl.store(y_ptr + token * N + row, value.to(y_ptr.dtype.element_ty), mask=token < M)


@triton.jit(do_not_specialize=["M"])  # type: ignore[untyped-decorator]
def w4a16_decode_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [M, K], rows 16-byte aligned, stride_xk = 1
    qweight_ptr,  # [N/16, K/64, 32, 4] int32
    scales_ptr,  # [N/16, quads, 8, 4] int32, two scales a word
    zeros_ptr,  # as scales; unused without HAS_ZEROS
    bias_ptr,  # [N]; unused without HAS_BIAS
    y_ptr,  # [M, N], contiguous
    partial_ptr,  # [programs, SPLIT_K, ROW_TILES · TOKEN_TILES, ROW_WARPS · 128] fp32
    arrivals_ptr,  # [programs] int32, 0 before and after; both unused with SPLIT_K = 1
    M,
    N,
    stride_xm,
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # 32, 64, 128, or 0 for one group a channel
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ELEMENT: tl.constexpr,  # "bf16" or "f16"
    TOKEN_TILES: tl.constexpr,  # 1 for M ≤ 8, 2 for M ≤ 16
    ROW_TILES: tl.constexpr,  # 16-row tiles a warp
    ROW_WARPS: tl.constexpr,
    K_WARPS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    DEPTH: tl.constexpr,  # chunks of weights in flight
    X_DEPTH: tl.constexpr,  # chunks of activations in flight
    FENCE: tl.constexpr,
):
    WARPS: tl.constexpr = ROW_WARPS * K_WARPS
    CHUNKS: tl.constexpr = K // 64
    STEPS: tl.constexpr = (CHUNKS + 8 * K_WARPS * SPLIT_K - 1) // (8 * K_WARPS * SPLIT_K)
    MASKED: tl.constexpr = CHUNKS != 8 * K_WARPS * SPLIT_K * STEPS
    GROUPS: tl.constexpr = K // GROUP_SIZE if GROUP_SIZE else 1
    ALL_QUADS: tl.constexpr = (GROUPS + 3) // 4
    QUADS: tl.constexpr = 128 // GROUP_SIZE if GROUP_SIZE else 1
    UNIT_QUADS: tl.constexpr = QUADS if GROUP_SIZE else 0
    ROW_TILE_WORDS: tl.constexpr = CHUNKS * 128

    pid, split = tl.program_id(0), tl.program_id(1)
    element = tl.arange(0, WARPS * 128)
    warp, lane_element = element // 128, element % 128
    # A program's spare row tiles repeat the last one: two warps then store equal values.
    first_tile = (pid * ROW_WARPS + warp % ROW_WARPS) * ROW_TILES
    first_tile = tl.minimum(first_tile, N // 16 - ROW_TILES)
    unit = split * K_WARPS * STEPS + warp // ROW_WARPS

    word_offsets = (first_tile * CHUNKS + unit * 8) * 128 + lane_element
    word_ptrs = qweight_ptr + tl.max_contiguous(tl.multiple_of(word_offsets, 4), 4)
    quad_offsets = (first_tile * ALL_QUADS + unit * UNIT_QUADS) * 32
    quad_offsets += (lane_element // 16) * 4 + lane_element % 4
    quad_offsets = tl.max_contiguous(tl.multiple_of(quad_offsets, 4), 4)
    # Columns beyond M read the last token again: no traffic, no mask, never stored.
    x_words = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    token = tl.minimum(lane_element // 16, M - 1).to(tl.int64)
    x_offsets = token * (stride_xm // 2) + unit * 256 + lane_element % 16
    value_ptrs0 = x_words + tl.max_contiguous(tl.multiple_of(x_offsets, 4), 4)
    token = tl.minimum(lane_element // 16 + 8, M - 1).to(tl.int64)
    x_offsets = token * (stride_xm // 2) + unit * 256 + lane_element % 16
    value_ptrs1 = x_words + tl.max_contiguous(tl.multiple_of(x_offsets, 4), 4)
    chunk = unit * 8

    word_queue, value_queue, sums, totals = (), (), (), ()
    for c in tl.static_range(DEPTH):
        word_queue = word_queue + (
            _load_weights(word_ptrs + c * 128, chunk + c < CHUNKS, ROW_TILES, MASKED, ROW_TILE_WORDS),
        )
    quad_mask = unit * QUADS < ALL_QUADS
    scales = _load_quads(scales_ptr + quad_offsets, quad_mask, ROW_TILES, QUADS, MASKED, ALL_QUADS * 32)
