"""The Gluon kernel of :mod:`.decode_ring`.

Products are those of the decode kernel (`mma.sync`, weights as the 16-row operand), operands arrive
another way: `cp.async` keeps a ring of stages full, weights, scales and activations alike. So bytes
in flight cost shared memory instead of registers, and a program copies its activations once for all
of its row warps, in the order in which lanes read them (16 bytes each, no bank twice).

Tensors are [1, 1, ROW_WARPS, 32 lanes, 4]; an element is one 32-bit register of a fragment.
Gluon is Triton with layouts and shared memory written out: plain Triton has no way to read one
shared fragment from every warp. The interpreter runs neither it nor inline assembly; the tests run
its arithmetic on NumPy (:mod:`emulator.gluon`), and a GPU the rest.
"""

# ruff: noqa: RUF005, C901 (Triton's front end adds tuples and does not unpack them; a kernel's
# branches fall at compile time)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from taut_kernels.gemm.w4a16.decode_ptx import SCALE_CONSTRAINTS, scale_ptx
from taut_kernels.gemm.w4a16.decode_ring_store_jit import reduce_and_store
from taut_kernels.gemm.w4a16.int4_jit import scale_lines, whole_quads, zero_places, zero_quads
from taut_kernels.gemm.w4a16.ring_address_jit import (
    activation_addresses,
    channel_offsets,
    channel_words,
    scale_addresses,
    word_addresses,
    zero_addresses,
)
from taut_kernels.gemm.w4a16.ring_stage_jit import (
    copy_activations,
    copy_stage,
    load_activations,
    multiply_chunks,
)
from taut_kernels.hopper import barrier, early_start, row_major


@gluon.constexpr_function
def _steps(chunks, chunks_a_step):
    """Count the steps of a program: an even number, at least four.

    Triton 3.6 fails on a loop of one pass.
    """
    return max(4, -(-chunks // (2 * chunks_a_step)) * 2)


@gluon.jit
def _scale_channels(totals, words, TOKEN_TILES: gl.constexpr, ELEMENT: gl.constexpr):
    """Return the totals times their channel's scale."""
    SCALE: gl.constexpr = scale_ptx(ELEMENT, 0)
    scaled = ()
    for i in gl.static_range(len(totals)):
        total = gl.inline_asm_elementwise(
            SCALE,
            SCALE_CONSTRAINTS,
            (words[i // TOKEN_TILES], totals[i], gl.zeros_like(totals[i])),
            gl.float32,
            is_pure=True,
            pack=4,
        )
        scaled = scaled + (total,)
    return scaled


@gluon.jit
def _allocate(
    STAGES: gl.constexpr, WARP_TILES: gl.constexpr, FRAGMENTS: gl.constexpr,
    WARP_SCALES: gl.constexpr, WARP_ZEROS: gl.constexpr, ROW_WARPS: gl.constexpr,
    HAS_GROUPS: gl.constexpr, HAS_ZEROS: gl.constexpr,
):  # fmt: skip
    """Allocate the rings of weights, scales, zero points and activations, twice each.

    Stages of even and of odd steps lie in allocations of their own: a step reads the one and fills
    the other, and Triton, which tells only allocations apart, sets no barrier between.
    """
    HALF: gl.constexpr = STAGES // 2
    S_HALF: gl.constexpr = HALF if HAS_GROUPS else 1
    w, s, z, x = (), (), (), ()
    for _ in gl.static_range(2):
        words = gl.allocate_shared_memory(
            gl.int32, [HALF, WARP_TILES, 1, ROW_WARPS, 32, 4], row_major(5)
        )
        scales = gl.allocate_shared_memory(
            gl.int32, [S_HALF, WARP_SCALES, 1, ROW_WARPS, 32], row_major(4)
        )
        zeros = scales
        if HAS_ZEROS:
            zeros = gl.allocate_shared_memory(
                gl.int32, [S_HALF, WARP_ZEROS, 1, ROW_WARPS, 8], row_major(4)
            )
        values = gl.allocate_shared_memory(gl.int32, [HALF, FRAGMENTS, 32, 4], row_major(3))
        w, s, z, x = w + (words,), s + (scales,), z + (zeros,), x + (values,)
    return w, s, z, x


@gluon.jit
def _slots(rings, ODD: gl.constexpr, slot, HAS_GROUPS: gl.constexpr):
    """Return one stage of each ring."""
    s_slot = slot if HAS_GROUPS else 0
    return (
        rings[0][ODD].index(slot),
        rings[1][ODD].index(s_slot),
        rings[2][ODD].index(s_slot),
        rings[3][ODD].index(slot),
    )


@gluon.jit
def _step(
    sums,
    totals,
    step,
    slots,  # what this step multiplies
    next_slots,  # what it fills, for the step AHEAD of it: read one step ago, by every warp
    first_chunk,
    weights,  # as of copy_stage
    activations,
    channel_zeros,
    AHEAD: gl.constexpr,
    STEPS: gl.constexpr,
    CHUNKS: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    QUADS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    ELEMENT: gl.constexpr,
    MASKED: gl.constexpr,
    CUT: gl.constexpr,
    L: gl.constexpr,
):
    """Wait for a stage, multiply it, and ask for a later one first."""
    CHUNKS_PER_STEP: gl.constexpr = CUT.chunks_per_step
    async_copy.wait_group(AHEAD - 1)
    barrier()
    place = zero_places(first_chunk, step, CHUNKS_PER_STEP, GROUP_SIZE, QUADS, L)
    ahead = step + AHEAD
    if ahead < STEPS:
        copy_stage(
            next_slots, ahead, weights, CHUNKS, CHUNKS_PER_STEP, GROUP_SIZE, QUADS, HAS_ZEROS,
            MASKED,
        )  # fmt: skip
        copy_activations(next_slots[3], ahead, activations, CHUNKS, CHUNKS_PER_STEP, MASKED)
    async_copy.commit_group()
    return multiply_chunks(
        sums, totals, slots, place, channel_zeros, CHUNKS_PER_STEP, CUT.row_tiles, CUT.token_tiles,
        GROUP_SIZE, QUADS, HAS_ZEROS, ELEMENT, L,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M"])
def w4a16_decode_ring_kernel(
    x_ptr,  # [M, K], rows 16-byte aligned, stride_xk = 1
    qweight_ptr,  # [N/16, K/64, 32, 4] int32
    scales_ptr,  # [N/16, quads, 8, 4, 2], read as words of two
    zeros_ptr,  # [N/16, quads, 8] int32; unused without HAS_ZEROS
    bias_ptr,  # [N]; unused without HAS_BIAS
    y_ptr,  # [M, N], contiguous
    partial_ptr,  # [programs, SPLIT_K, ROW_TILES · TOKEN_TILES, ROW_WARPS · 128] fp32
    arrivals_ptr,  # [programs] int32, 0 before and after; both unused with SPLIT_K = 1
    M,
    N,
    stride_xm,
    K: gl.constexpr,
    GROUP_SIZE: gl.constexpr,  # 32, 64, 128, or 0 for one group a channel
    HAS_ZEROS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ELEMENT: gl.constexpr,  # "bf16" or "f16"
    CUT: gl.constexpr,  # of :mod:`.decode_ring_tile`
    PDL: gl.constexpr,  # start before the kernel in front has ended (sm_90)
):
    TOKEN_TILES: gl.constexpr = CUT.token_tiles
    ROW_TILES: gl.constexpr = CUT.row_tiles
    ROW_WARPS: gl.constexpr = CUT.row_warps
    CHUNKS_PER_STEP: gl.constexpr = CUT.chunks_per_step
    SPLIT_K: gl.constexpr = CUT.split_k
    STAGES: gl.constexpr = CUT.stages
    # Outermost is what a warp copies one after another.
    L: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1, 4], [1, 1, 1, 32, 1], [1, 1, ROW_WARPS, 1, 1], [4, 3, 2, 1, 0]
    )
    LS: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1], [1, 1, 1, 32], [1, 1, ROW_WARPS, 1], [3, 2, 1, 0]
    )
    LX: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [ROW_WARPS, 1, 1], [2, 1, 0])
    CHUNKS: gl.constexpr = K // 64
    STEPS: gl.constexpr = _steps(CHUNKS, CHUNKS_PER_STEP * SPLIT_K)
    MASKED: gl.constexpr = CHUNKS != CHUNKS_PER_STEP * SPLIT_K * STEPS
    ALL_QUADS: gl.constexpr = (K // GROUP_SIZE + 3) // 4 if GROUP_SIZE else 1
    WARP_GROUPS: gl.constexpr = CHUNKS_PER_STEP * 64 // GROUP_SIZE if GROUP_SIZE else 1
    WARP_LINES: gl.constexpr = scale_lines(CHUNKS_PER_STEP, GROUP_SIZE)
    QUADS: gl.constexpr = whole_quads(CHUNKS_PER_STEP, GROUP_SIZE)
    FULL: gl.constexpr = STAGES - 1 if STAGES - 1 < STEPS else STEPS

    if PDL:
        early_start(False)
    split = gl.program_id(1)
    first_chunk = split * (STEPS * CHUNKS_PER_STEP)
    words = word_addresses(
        qweight_ptr, N, first_chunk, CHUNKS, CHUNKS_PER_STEP, ROW_TILES, ROW_WARPS, L
    )
    scales = scale_addresses(
        scales_ptr, N, split * (STEPS * WARP_GROUPS), ALL_QUADS, WARP_LINES, QUADS, ROW_TILES,
        ROW_WARPS, LS,
    )  # fmt: skip
    zeros = scales
    if HAS_ZEROS and GROUP_SIZE:
        zeros = zero_addresses(
            zeros_ptr, N, first_chunk, ALL_QUADS, CHUNKS_PER_STEP, GROUP_SIZE, ROW_TILES, ROW_WARPS,
        )  # fmt: skip
    weights = (words, scales, zeros)
    activations = activation_addresses(
        x_ptr, M, stride_xm, first_chunk, CHUNKS_PER_STEP, TOKEN_TILES, LX
    )
    rings = _allocate(
        STAGES, CHUNKS_PER_STEP * ROW_TILES, CHUNKS_PER_STEP * 2 * TOKEN_TILES,
        WARP_LINES * ROW_TILES, zero_quads(CHUNKS_PER_STEP, GROUP_SIZE) * ROW_TILES, ROW_WARPS,
        GROUP_SIZE != 0, HAS_ZEROS,
    )  # fmt: skip
    for stage in gl.static_range(STAGES - 1):
        if stage < STEPS:
            copy_stage(
                _slots(rings, stage % 2, stage // 2, GROUP_SIZE != 0), stage, weights, CHUNKS,
                CHUNKS_PER_STEP, GROUP_SIZE, QUADS, HAS_ZEROS, MASKED,
            )  # fmt: skip
        async_copy.commit_group()
    if PDL:
        # The first weights, which nobody writes while serving, are on their way: now wait for the
        # kernel that makes the activations (and the one that used arrivals and partial before).
        early_start(True)
    # Copied behind the weights, the first activations would make the first step wait for them all.
    load_activations(rings[3], activations, FULL, CHUNKS, CHUNKS_PER_STEP, MASKED)

    channel_zeros, sums = (), ()
    if GROUP_SIZE == 0 and HAS_ZEROS:
        channel_zeros = channel_offsets(zeros_ptr, N, ROW_TILES, ROW_WARPS, ELEMENT, L)
    for _ in gl.static_range(ROW_TILES * TOKEN_TILES):
        sums = sums + (gl.full((1, 1, ROW_WARPS, 32, 4), 0.0, gl.float32, L),)
    totals = sums

    slot, before = 0, STAGES // 2 - 1
    for pair in range(STEPS // 2):
        for odd in gl.static_range(2):
            # STAGES - 1 steps on, an even step is an odd one of the slot before this one's, and an
            # odd step an even one of this one's.
            sums, totals = _step(
                sums, totals, 2 * pair + odd, _slots(rings, odd, slot, GROUP_SIZE != 0),
                _slots(rings, 1 - odd, slot if odd else before, GROUP_SIZE != 0), first_chunk,
                weights, activations, channel_zeros, STAGES - 1, STEPS, CHUNKS, GROUP_SIZE, QUADS,
                HAS_ZEROS, ELEMENT, MASKED, CUT, L,
            )  # fmt: skip
        before = slot
        slot = gl.where(slot + 1 == STAGES // 2, 0, slot + 1)
    if GROUP_SIZE == 0:
        channel_scales = channel_words(scales_ptr, N, ROW_TILES, ROW_WARPS, L)
        totals = _scale_channels(sums, channel_scales, TOKEN_TILES, ELEMENT)
    reduce_and_store(
        totals, y_ptr, bias_ptr, partial_ptr, arrivals_ptr, M, N, HAS_BIAS, TOKEN_TILES, ROW_TILES,
        ROW_WARPS, SPLIT_K, L,
    )  # fmt: skip
