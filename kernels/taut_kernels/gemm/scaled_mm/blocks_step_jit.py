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
- `ptxas` has to be 12.9 or newer (:mod:`taut_kernels.launch.assembler`).
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from taut_kernels.hopper import first_token, load_block


@gluon.jit
def has_room(ring, at):
    """Wait until the ring's ``at``-th blocks may be written; return their stage."""
    STAGES: gl.constexpr = ring[1].shape[0]
    slot = at % STAGES
    mbarrier.wait(ring[4].index(slot), ((at // STAGES) & 1) ^ 1)
    return slot


@gluon.jit
def ask(x_desc, w_desc, ring, pid_m, pid_n, at, k, M):
    """Ask TMA for the ``k``-th blocks of a tile, the ring's ``at``-th, once there is room.

    Weights first: they come from afar.
    """
    a, b, full = ring[0], ring[1], ring[3]
    PARTS: gl.constexpr = a.shape[0] // b.shape[0]
    COLUMNS: gl.constexpr = b.shape[1]
    slot = has_room(ring, at)
    landed = full.index(slot)
    mbarrier.expect(landed, (PARTS * 64 + COLUMNS) * 128)
    load_block(w_desc, [pid_n * COLUMNS, k * 128], landed, b.index(slot))
    for part in gl.static_range(PARTS):
        first = first_token(pid_m * PARTS + part, M, 64)
        load_block(x_desc, [first, k * 128], landed, a.index(slot * PARTS + part))


@gluon.jit
def ask_boxes(x_desc, w_desc, ring, pid_m, pid_n, at, k, M):
    """Ask for the ``k``-th blocks as :func:`ask`, of one part whose tokens come in several boxes.

    As many boxes as have tokens: the places of the others hold anything, and so do their rows of
    the sums, which nobody stores.
    """
    boxes, b, full = ring[6], ring[1], ring[3]
    BOX: gl.constexpr = boxes.shape[1]
    BOXES: gl.constexpr = boxes.shape[0] // b.shape[0]
    COLUMNS: gl.constexpr = b.shape[1]
    first = first_token(pid_m, M, BOX * BOXES)
    some = gl.minimum((M - first + BOX - 1) // BOX, BOXES)
    slot = has_room(ring, at)
    landed = full.index(slot)
    # Bytes are a constant, the number of boxes is none.
    for count in gl.static_range(1, BOXES + 1):
        mbarrier.expect(landed, (count * BOX + COLUMNS) * 128, pred=some == count)
    load_block(w_desc, [pid_n * COLUMNS, k * 128], landed, b.index(slot))
    for box in range(some):
        load_block(x_desc, [first + box * BOX, k * 128], landed, boxes.index(slot * BOXES + box))


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
