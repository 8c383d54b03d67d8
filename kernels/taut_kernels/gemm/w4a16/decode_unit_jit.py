"""One unit of the decode kernel's work: loads, products and group scales, as jit functions.

A *unit* is 16 output rows × 512 K indices a warp: 8 *chunks* of 64, each one 16-byte load of
weights a lane. See :mod:`.decode_kernel`.
"""

# ruff: noqa: RUF005 (Triton's front end adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.gemm.w4a16.decode_ptx import (
    FENCE_CONSTRAINTS,
    FENCE_PTX,
    SCALE_CONSTRAINTS,
    multiply_constraints,
    multiply_ptx,
    scale_ptx,
)
from taut_kernels.gemm.w4a16.zeros_jit import every_element


@triton.jit
def load_weights(ptrs, mask, MASKED: tl.constexpr):
    """Load one chunk of each warp's row tile."""
    if MASKED:
        words = tl.load(ptrs, mask=mask, other=0, eviction_policy="evict_first")
    else:
        words = tl.load(ptrs, eviction_policy="evict_first")
    return words


@triton.jit
def load_activations(ptrs0, ptrs1, mask, TOKEN_TILES: tl.constexpr, MASKED: tl.constexpr):
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


@triton.jit
def load_quads(
    ptrs,
    first,
    QUADS: tl.constexpr,
    ALL_QUADS: tl.constexpr,
    WORDS: tl.constexpr,  # of a quad
    MASKED: tl.constexpr,
):
    """Load a unit's scales or zero points, four groups a tensor."""
    quads = ()
    for q in tl.static_range(QUADS):
        if MASKED:
            quad = tl.load(ptrs + q * WORDS, mask=first + q < ALL_QUADS, other=0)
        else:
            quad = tl.load(ptrs + q * WORDS)
        quads = quads + (quad,)
    return quads


@triton.jit
def zero_accumulators(COUNT: tl.constexpr, SIZE: tl.constexpr):
    accumulators = ()
    for _ in tl.static_range(COUNT):
        accumulators = accumulators + (tl.zeros((SIZE,), tl.float32),)
    return accumulators


@triton.jit
def _multiply(
    words,
    values,
    zeros,  # of a quad, a word a lane
    sums,
    HALF: tl.constexpr,
    TOKEN_TILES: tl.constexpr,
    ZERO_INDEX: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """Add 32 K indices to ``sums``, a tuple of TOKEN_TILES accumulators."""
    operands = (words,)
    for tile in tl.static_range(TOKEN_TILES):
        operands = operands + (values[HALF * TOKEN_TILES + tile],)
    if HAS_ZEROS:
        operands = operands + (every_element(zeros),)
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


@triton.jit
def add_scaled(scales, sums, totals, INDEX: tl.constexpr, ELEMENT: tl.constexpr):
    """Return ``totals + scale * sums``, in fp32."""
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


@triton.jit
def _multiply_half(
    words,
    values,
    scales,
    zeros,
    sums,
    totals,
    HALF: tl.constexpr,
    K_IN_UNIT: tl.constexpr,  # 0..511: where in its unit this half chunk starts
    TOKEN_TILES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """Add 32 K indices, and close their group where it ends there."""
    GROUP: tl.constexpr = K_IN_UNIT // GROUP_SIZE if GROUP_SIZE else 0
    CLOSES: tl.constexpr = GROUP_SIZE != 0 and (K_IN_UNIT + 32) % GROUP_SIZE == 0
    sums = _multiply(
        words, values, zeros[GROUP // 4] if HAS_ZEROS else words, sums, HALF, TOKEN_TILES,
        GROUP % 4, HAS_ZEROS, ELEMENT,
    )  # fmt: skip
    if CLOSES:
        totals = add_scaled(scales[GROUP // 4], sums, totals, GROUP % 4, ELEMENT)
        sums = zero_accumulators(TOKEN_TILES, words.shape[0])
    return sums, totals


@triton.constexpr_function
def _chunks_ahead(chunk: int, k_warps: int) -> int:
    """Place a chunk of this unit or the next: the warp's next unit is ``k_warps`` units on."""
    return chunk if chunk < 8 else chunk - 8 + 8 * k_warps


@triton.jit
def multiply_unit(
    word_queue,  # loaded chunks ahead
    value_queue,  # likewise activations
    scales,  # this unit's quads
    zeros,  # likewise
    sums,  # of the open group, TOKEN_TILES; () where every group closes in its unit
    totals,  # scaled sums of the closed groups
    word_ptrs,
    value_ptrs0,
    value_ptrs1,
    chunk,  # index of this unit's first chunk, a warp each
    num_chunks,
    GROUP_SIZE: tl.constexpr,  # 0: one group a channel, scaled after the loop
    HAS_ZEROS: tl.constexpr,
    ELEMENT: tl.constexpr,
    MASKED: tl.constexpr,
    CUT: tl.constexpr,  # of :mod:`.decode_tile`
    LAST: tl.constexpr,
):
    """Consume one unit, loading what follows it as registers fall free."""
    TOKEN_TILES: tl.constexpr = CUT.token_tiles
    K_WARPS: tl.constexpr = CUT.k_warps
    DEPTH: tl.constexpr = CUT.depth
    X_DEPTH: tl.constexpr = CUT.x_depth
    BATCH: tl.constexpr = CUT.batch
    SIZE: tl.constexpr = chunk.shape[0]
    if GROUP_SIZE:
        sums = zero_accumulators(TOKEN_TILES, SIZE)
    for c in tl.static_range(8):
        words, values = word_queue[0], value_queue[0]
        word_queue, value_queue = word_queue[1:], value_queue[1:]
        for half in tl.static_range(2):
            sums, totals = _multiply_half(
                words, values, scales, zeros, sums, totals, half, 64 * c + 32 * half,
                TOKEN_TILES, GROUP_SIZE, HAS_ZEROS, ELEMENT,
            )  # fmt: skip
        if (c + 1) % BATCH == 0:
            for b in tl.static_range(BATCH):
                if not LAST or c + 1 - BATCH + b + DEPTH < 8:
                    words = load_weights(
                        word_ptrs + _chunks_ahead(c + 1 - BATCH + b + DEPTH, K_WARPS) * 128,
                        chunk + _chunks_ahead(c + 1 - BATCH + b + DEPTH, K_WARPS) < num_chunks,
                        MASKED,
                    )
                    word_queue = word_queue + (words,)
                if not LAST or c + 1 - BATCH + b + X_DEPTH < 8:
                    values = load_activations(
                        value_ptrs0 + _chunks_ahead(c + 1 - BATCH + b + X_DEPTH, K_WARPS) * 32,
                        value_ptrs1 + _chunks_ahead(c + 1 - BATCH + b + X_DEPTH, K_WARPS) * 32,
                        chunk + _chunks_ahead(c + 1 - BATCH + b + X_DEPTH, K_WARPS) < num_chunks,
                        TOKEN_TILES,
                        MASKED,
                    )
                    value_queue = value_queue + (values,)
        if CUT.fence and not LAST and (c + 1) % BATCH == 0:
            tl.inline_asm_elementwise(
                FENCE_PTX, FENCE_CONSTRAINTS, (chunk,), dtype=tl.int32, is_pure=False, pack=4
            )
    return word_queue, value_queue, () if GROUP_SIZE else sums, totals
