"""A step of K of FP8 products with 128 × 128 blocks of weights on sm_90: what both kernels share.

A ring is a tuple: blocks of tokens [stages · parts, 64, 128], blocks of weights [stages, 128, 128],
scales, and the barriers that say a stage has landed and has room; a kernel may add more.

A step of K is one group of scales: its product starts from zero, and enters the sums in fp32 times
the scales. What the compilers do with that decides the time (H100, Triton 3.6, 2026-11-25; README,
"Measured facts"):

- LLVM puts a product's scaling behind the last wait there is, past the next product, and sums end
  in local memory. A wait for nothing that names the sums (:func:`add`) keeps it where it stands.
- ``use_acc`` is false in every call, yet no constant: with a constant each product gets registers
  of its own, and those of the one before are taken, too.
- `ptxas` has to be 12.9 or newer (:mod:`taut_kernels._assembler`).
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from taut_kernels.attention._hopper_tile_jit import load_block
from taut_kernels.gemm._scaled_mm_hopper_jit import first_token, place


@gluon.jit
def share(item, tiles_m, tiles_n, steps, GROUP_M: gl.constexpr, SPLIT_K: gl.constexpr):
    """Return the tile of tokens and of features, the first step and the steps of a share of one."""
    pid_m, pid_n = place(item // SPLIT_K, tiles_m, tiles_n, GROUP_M)
    split = item % SPLIT_K
    first = steps * split // SPLIT_K
    return pid_m, pid_n, first, steps * (split + 1) // SPLIT_K - first


@gluon.jit
def ask(x_desc, w_desc, ring, sizes, GROUP_M: gl.constexpr, SPLIT_K: gl.constexpr):
    """Run the warp that asks TMA for blocks of both operands."""
    a, b, _, full, empty = ring[:5]
    M, _, steps, tiles_m, tiles_n = sizes
    STAGES: gl.constexpr = b.shape[0]
    COLUMNS: gl.constexpr = b.shape[1]
    PARTS: gl.constexpr = a.shape[0] // STAGES
    at = 0
    for item in range(gl.program_id(0), tiles_m * tiles_n * SPLIT_K, gl.num_programs(0)):
        pid_m, pid_n, first, own = share(item, tiles_m, tiles_n, steps, GROUP_M, SPLIT_K)
        for k in range(first, first + own):
            slot = at % STAGES
            landed = full.index(slot)
            mbarrier.wait(empty.index(slot), ((at // STAGES) & 1) ^ 1)
            mbarrier.expect(landed, (PARTS * 64 + COLUMNS) * 128)
            for part in gl.static_range(PARTS):
                token = first_token(pid_m * PARTS + part, M, 64)
                load_block(x_desc, [token, k * 128], landed, a.index(slot * PARTS + part))
            load_block(w_desc, [pid_n * COLUMNS, k * 128], landed, b.index(slot))
            at += 1


@gluon.jit
def landed(ring, at):
    """Wait for the ring's ``at``-th blocks; return their stage."""
    STAGES: gl.constexpr = ring[1].shape[0]
    slot = at % STAGES
    mbarrier.wait(ring[3].index(slot), (at // STAGES) & 1)
    return slot


@gluon.jit
def begin(ring, slot, product, never, PART: gl.constexpr):
    """Begin the product of a stage's ``PART``-th 64 tokens in the registers of a former one."""
    a, b = ring[0], ring[1]
    PARTS: gl.constexpr = a.shape[0] // b.shape[0]
    columns = b.index(slot).permute([1, 0])
    return hopper.warpgroup_mma(
        a.index(slot * PARTS + PART), columns, product, use_acc=never, is_async=True
    )


@gluon.jit
def give_back(ring, at):
    """Let the ring's ``at``-th blocks be written over; all warps of a group meet for it."""
    STAGES: gl.constexpr = ring[1].shape[0]
    mbarrier.arrive(ring[4].index(at % STAGES), count=1)


@gluon.jit
def add(sums, product, factors, RUNNING: gl.constexpr):
    """Add a finished product times its tokens' factors; here, and not behind the next wait.

    ``RUNNING`` products are under way.
    """
    sums += product * gl.expand_dims(factors, 1)
    return hopper.warpgroup_mma_wait(RUNNING, deps=[sums])
