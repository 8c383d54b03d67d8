"""The Gluon kernel of :mod:`.ring`.

Weights are operand A of `wgmma` from registers, activations operand B from shared memory; both come
through a ring of `cp.async` stages. A product is issued and left running while the next 64 columns
of weights are converted: two sets of operand registers take turns, and one product is outstanding
wherever a set is written again.

Weights and their scales lie in shared memory as in :mod:`.decode_ring_kernel`,
whose addresses and copies these are: [1, 1, WARPS, 32 lanes, 4]. Triton's interpreter runs neither
Gluon nor inline assembly; only a GPU runs this file.
"""

# ruff: noqa: RUF005, C901 (Triton's front end adds tuples and does not unpack them; a kernel's
# branches fall at compile time)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from taut_kernels.gemm.w4a16.int4_jit import (
    convert,
    scale_lines,
    whole_quads,
    zero_places,
    zero_quads,
)
from taut_kernels.gemm.w4a16.ring_address_jit import (
    channel_offsets,
    channel_words,
    scale_addresses,
    word_addresses,
    zero_addresses,
)
from taut_kernels.gemm.w4a16.ring_operands_jit import (
    copy_tokens,
    load_operands,
    slots,
    token_addresses,
)
from taut_kernels.gemm.w4a16.ring_stage_jit import copy_stage
from taut_kernels.hopper import (
    barrier,
    early_start,
    multiply,
    no_sums,
    reduce_and_store,
    row_major,
    steps_of,
    sums_of,
    wait_for_products,
)

# Triton 3.9 has reinterpret, 3.6 only _reinterpret.
_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.constexpr_function
def _element(name):
    return gl.bfloat16 if name == "bf16" else gl.float16


@gluon.jit
def _allocate(
    STAGES: gl.constexpr, WARP_TILES: gl.constexpr, WARP_SCALES: gl.constexpr,
    WARP_ZEROS: gl.constexpr, WARPS: gl.constexpr, BLOCK_M: gl.constexpr,
    CHUNKS_PER_STEP: gl.constexpr, HAS_GROUPS: gl.constexpr, HAS_ZEROS: gl.constexpr,
):  # fmt: skip
    """Allocate the rings of weights, scales and zero points, and one of activations a chunk."""
    S_STAGES: gl.constexpr = STAGES if HAS_GROUPS else 1
    words = gl.allocate_shared_memory(gl.int32, [STAGES, WARP_TILES, 1, WARPS, 32, 4], row_major(5))
    scales = gl.allocate_shared_memory(
        gl.int32, [S_STAGES, WARP_SCALES, 1, WARPS, 32], row_major(4)
    )
    zeros = scales
    if HAS_ZEROS:
        zeros = gl.allocate_shared_memory(
            gl.int32, [S_STAGES, WARP_ZEROS, 1, WARPS, 8], row_major(4)
        )
    # Words of two columns: rows of 128 bytes, swizzled as `wgmma` reads them.
    X_WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    x = ()
    for _ in gl.static_range(CHUNKS_PER_STEP):
        x = x + (gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_M, 32], X_WORDS),)
    return (words, scales, zeros), x


@gluon.jit
def _operand_b(words, T: gl.constexpr, BLOCK_M: gl.constexpr):
    """Return a chunk of activations as operand B, [64, BLOCK_M]."""
    VALUES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    if _PUBLIC:
        x = words.reinterpret(T, [BLOCK_M, 64], VALUES)
    else:
        x = words._reinterpret(T, [BLOCK_M, 64], VALUES)
    return x.permute((1, 0))


@gluon.jit
def _next_product(
    sums,
    operands,  # of load_operands
    x_rings,
    slot,
    i: gl.constexpr,  # which of the step's products
    ROW_TILES: gl.constexpr,
    PARTS: gl.constexpr,
    RUNNING: gl.constexpr,
    BLOCK_M: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    ELEMENT: gl.constexpr,
    WARPS: gl.constexpr,
    OPERAND: gl.constexpr,
):
    """Convert a part of a chunk and multiply it while the ones before are being multiplied."""
    TILE: gl.constexpr = i // PARTS
    PART: gl.constexpr = i % PARTS
    x = _operand_b(x_rings[TILE // ROW_TILES].index(slot), _element(ELEMENT), BLOCK_M)
    x_part = x.slice(PART * (64 // PARTS), 64 // PARTS, 0)
    a = convert(operands[TILE], PART, PARTS, HAS_ZEROS, ELEMENT, WARPS, OPERAND)
    return multiply(sums, a, (x_part,), TILE % ROW_TILES, RUNNING, WARPS)


@gluon.jit
def _copy_ahead(
    rings,
    x_rings,
    slot,
    step,
    weights,  # as of copy_stage
    tokens,
    first_chunk,
    STEPS: gl.constexpr,
    CHUNKS: gl.constexpr,
    CHUNKS_PER_STEP: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    QUADS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Ask for a later step, if there is one."""
    if step < STEPS:
        into = slots(rings, slot, GROUP_SIZE)
        copy_stage(
            into, step, weights, CHUNKS, CHUNKS_PER_STEP, GROUP_SIZE, QUADS, HAS_ZEROS, MASKED
        )
        copy_tokens(x_rings, slot, tokens, step, first_chunk, CHUNKS, CHUNKS_PER_STEP, MASKED)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["M"])
def w4a16_wgmma_ring_kernel(
    x_ptr,  # [M, K], rows 16-byte aligned, stride_xk = 1
    qweight_ptr,  # [N/16, K/64, 32, 4] int32
    scales_ptr,  # [N/16, quads, 8, 4, 2], read as words of two
    zeros_ptr,  # [N/16, quads, 8] int32; unused without HAS_ZEROS
    bias_ptr,  # [N]; unused without HAS_BIAS
    y_ptr,  # [M, N], contiguous
    partial_ptr,  # [tiles of y, SPLIT_K, ROW_TILES, BLOCK_M/8, 128 · WARPS] fp32
    arrivals_ptr,  # [tiles of y or more] int32, 0 before and after; both unused with SPLIT_K = 1
    M,
    N,
    stride_xm,
    K: gl.constexpr,
    GROUP_SIZE: gl.constexpr,  # 32, 64, 128, or 0 for one group a channel
    HAS_ZEROS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ELEMENT: gl.constexpr,  # "bf16" or "f16"
    CUT: gl.constexpr,  # of :mod:`.ring_tile`
    PDL: gl.constexpr,  # start before the kernel in front has ended (sm_90)
):
    BLOCK_M: gl.constexpr = CUT.block_m
    ROW_TILES: gl.constexpr = CUT.row_tiles
    WARPS: gl.constexpr = CUT.warps
    CHUNKS_PER_STEP: gl.constexpr = CUT.chunks_per_step
    SPLIT_K: gl.constexpr = CUT.split_k
    STAGES: gl.constexpr = CUT.stages
    PARTS: gl.constexpr = CUT.parts
    RUNNING: gl.constexpr = CUT.running
    L: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1, 4], [1, 1, 1, 32, 1], [1, 1, WARPS, 1, 1], [4, 3, 2, 1, 0]
    )
    LS: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1], [1, 1, 1, 32], [1, 1, WARPS, 1], [3, 2, 1, 0])
    LX: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    ACC: gl.constexpr = sums_of(BLOCK_M, WARPS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    CHUNKS: gl.constexpr = K // 64
    STEPS: gl.constexpr = steps_of(CHUNKS, CHUNKS_PER_STEP, SPLIT_K)
    MASKED: gl.constexpr = CHUNKS != CHUNKS_PER_STEP * SPLIT_K * STEPS
    ALL_QUADS: gl.constexpr = (K // GROUP_SIZE + 3) // 4 if GROUP_SIZE else 1
    WARP_LINES: gl.constexpr = scale_lines(CHUNKS_PER_STEP, GROUP_SIZE)
    QUADS: gl.constexpr = whole_quads(CHUNKS_PER_STEP, GROUP_SIZE)
    TILES: gl.constexpr = CHUNKS_PER_STEP * ROW_TILES
    # One stage stays empty: the last product of the step before still reads its activations.
    AHEAD: gl.constexpr = STAGES - 2

    if PDL:
        early_start(False)
    split = gl.program_id(1)
    first_chunk = split * (STEPS * CHUNKS_PER_STEP)
    words = word_addresses(
        qweight_ptr, N, first_chunk, CHUNKS, CHUNKS_PER_STEP, ROW_TILES, WARPS, L
    )
    scales = scale_addresses(
        scales_ptr, N, first_chunk * 64 // GROUP_SIZE if GROUP_SIZE else 0, ALL_QUADS, WARP_LINES,
        QUADS, ROW_TILES, WARPS, LS,
    )  # fmt: skip
    zeros = scales
    if HAS_ZEROS and GROUP_SIZE:
        zeros = zero_addresses(
            zeros_ptr, N, first_chunk, ALL_QUADS, CHUNKS_PER_STEP, GROUP_SIZE, ROW_TILES, WARPS
        )
    weights = (words, scales, zeros)
    tokens = token_addresses(x_ptr, M, stride_xm, first_chunk, BLOCK_M, LX)
    rings, x_rings = _allocate(
        STAGES, TILES, WARP_LINES * ROW_TILES, zero_quads(CHUNKS_PER_STEP, GROUP_SIZE) * ROW_TILES,
        WARPS, BLOCK_M, CHUNKS_PER_STEP, GROUP_SIZE != 0, HAS_ZEROS,
    )  # fmt: skip
    for stage in gl.static_range(AHEAD):
        if stage < STEPS:
            into = slots(rings, stage, GROUP_SIZE)
            copy_stage(
                into, stage, weights, CHUNKS, CHUNKS_PER_STEP, GROUP_SIZE, QUADS, HAS_ZEROS, MASKED
            )
    if PDL:
        # The first weights, which nobody writes while serving, are on their way: now wait for the
        # kernel that makes the activations (and the one that used arrivals and partial before).
        early_start(True)
    for stage in gl.static_range(AHEAD):
        if stage < STEPS:
            copy_tokens(x_rings, stage, tokens, stage, first_chunk, CHUNKS, CHUNKS_PER_STEP, MASKED)
        async_copy.commit_group()

    channels = ((), ())
    if GROUP_SIZE == 0:
        channels = ((), channel_words(scales_ptr, N, ROW_TILES, WARPS, L))
        if HAS_ZEROS:
            channels = (
                channel_offsets(zeros_ptr, N, ROW_TILES, WARPS, ELEMENT, L),
                channels[1],
            )
    sums = ()
    for _ in gl.static_range(ROW_TILES):
        sums = sums + (no_sums(BLOCK_M, WARPS),)

    slot, next_slot = 0, AHEAD
    for step in range(STEPS):
        async_copy.wait_group(AHEAD - 1)
        barrier()
        now = slots(rings, slot, GROUP_SIZE)
        _copy_ahead(
            rings, x_rings, next_slot, step + AHEAD, weights, tokens, first_chunk, STEPS, CHUNKS,
            CHUNKS_PER_STEP, GROUP_SIZE, QUADS, HAS_ZEROS, MASKED,
        )  # fmt: skip
        place = zero_places(first_chunk, step, CHUNKS_PER_STEP, GROUP_SIZE, QUADS, L)
        operands = load_operands(
            now, place, channels, TILES, ROW_TILES, GROUP_SIZE, QUADS, HAS_ZEROS, ELEMENT, L
        )
        for i in gl.static_range(TILES * PARTS):
            sums = _next_product(
                sums, operands, x_rings, slot, i, ROW_TILES, PARTS, RUNNING, BLOCK_M, HAS_ZEROS,
                ELEMENT, WARPS, OPERAND,
            )  # fmt: skip
        slot = gl.where(slot + 1 == STAGES, 0, slot + 1)
        next_slot = gl.where(next_slot + 1 == STAGES, 0, next_slot + 1)
    reduce_and_store(
        wait_for_products(sums, 0), y_ptr, bias_ptr, partial_ptr, arrivals_ptr, M, N, HAS_BIAS,
        BLOCK_M, ROW_TILES, WARPS, SPLIT_K, ACC,
    )  # fmt: skip
