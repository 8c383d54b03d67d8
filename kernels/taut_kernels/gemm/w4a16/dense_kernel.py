"""The Triton kernel of :mod:`.dense`: packed weights to dense ones."""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator"

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.gemm.w4a16.portable_kernel import convert_words, group_index
from taut_kernels.gemm.w4a16.zeros_jit import lane_axis, lane_pointers


@triton.jit(do_not_specialize=["first_tile"])
def w4a16_dequantize_kernel(
    qweight_ptr,  # [N/16, K/64, 32, 4] int32
    scales_ptr,  # [N/16, quads, 8, 4, 2], read as words of two
    zeros_ptr,  # [N/16, quads, 8] int32; unused without HAS_ZEROS
    weight_ptr,  # [rows, K], contiguous, rows from 16 · first_tile on
    first_tile,
    tiles,  # 16-row tiles to convert
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # 32, 64, 128, or 0 for one group a channel
    HAS_ZEROS: tl.constexpr,
    ELEMENT: tl.constexpr,
    CHUNKS_PER_PROGRAM: tl.constexpr,
    WARPS: tl.constexpr,
):
    CHUNKS: tl.constexpr = K // 64
    GROUPS: tl.constexpr = K // GROUP_SIZE if GROUP_SIZE else 1
    QUADS: tl.constexpr = (GROUPS + 3) // 4
    element = tl.arange(0, WARPS * 128)
    own_tile = tl.program_id(0) * WARPS + element // 128
    tile = first_tile + tl.minimum(own_tile, tiles - 1)
    lane_element = element % 128
    word_offsets = tile * (CHUNKS * 128) + lane_element
    word_ptrs = qweight_ptr + tl.max_contiguous(tl.multiple_of(word_offsets, 4), 4)
    quad_offsets = tile * (QUADS * 32) + (lane_element // 16) * 4 + lane_element % 4
    quad_offsets = tl.max_contiguous(tl.multiple_of(quad_offsets, 4), 4)
    scale_words = scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    zero_ptrs = scale_words
    if HAS_ZEROS:
        lane = lane_axis(WARPS)
        own_tile = tl.program_id(0) * WARPS + lane // 32
        zero_tile = first_tile + tl.minimum(own_tile, tiles - 1)
        zero_ptrs = lane_pointers(zeros_ptr, zero_tile * QUADS, lane)
    rows = tl.program_id(0) * (WARPS * 16) + tl.arange(0, WARPS * 16)
    columns = tl.arange(0, 64)
    out = weight_ptr + rows[:, None].to(tl.int64) * K + columns[None, :]
    same: tl.constexpr = GROUP_SIZE != 32
    for c in tl.range(CHUNKS_PER_PROGRAM):
        chunk = tl.program_id(1) * CHUNKS_PER_PROGRAM + c
        if chunk < CHUNKS:
            quad = 0
            if GROUP_SIZE:
                quad = chunk * 64 // GROUP_SIZE // 4
            words = tl.load(word_ptrs + chunk * 128, eviction_policy="evict_first")
            quads = tl.load(scale_words + quad_offsets + quad * 32)
            zeros = quads
            if HAS_ZEROS:
                zeros = tl.load(zero_ptrs + quad * 8)
            index = group_index(chunk, GROUP_SIZE, WARPS * 128)
            part = convert_words(words, quads, zeros, index, ELEMENT, HAS_ZEROS, same, WARPS)
            # warp, r, g are the row; h, t, i, j, b the column (formats_mma).
            part = tl.permute(part, (0, 5, 1, 7, 2, 6, 3, 4))
            weight = tl.reshape(part, (WARPS * 16, 64))
            tl.store(out + chunk * 64, weight, mask=rows[:, None] < tiles * 16)
