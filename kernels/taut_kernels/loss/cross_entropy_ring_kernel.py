"""The Gluon kernel of cross entropy that holds rows on chip: memory is read once, written once.

A persistent program, or one of PARTS that share a row, walks over its rows in chunks. A ring of
shared memory holds a part of a row and more: `cp.async` fills slots AHEAD steps before they are
read; a step takes one chunk into the running softmax of each thread, turns the chunk CHUNKS + LAG
older, of the row before, into its gradient, and lets the next step fill that one's slot. So reads,
exponentials and writes of neighbouring rows overlap, and a row's sums have LAG steps to reach the
programs that share it, through global memory.

A thread reads only what it copied; tensors are [UNITS, THREADS, 4] words of two bf16 logits.
Gluon is Triton with layouts and shared memory written out. The interpreter does not run it; tests
run its arithmetic on NumPy (:mod:`emulator.rows`), and a GPU the rest.
"""

# ruff: noqa: RUF005 (Triton's front end adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from taut_kernels.hopper import barrier
from taut_kernels.loss.cross_entropy_ring_step_jit import (
    copy_chunk,
    decay_of,
    exp2,
    loads_at,
    log2_of,
    part_words,
    row_pointer,
    target_of,
    walk,
)


@gluon.jit
def _pieces(UNITS: gl.constexpr, THREADS: gl.constexpr, L: gl.constexpr):
    """Return each element's piece, [UNITS, THREADS, 1], and its word, [UNITS, THREADS, 4]."""
    unit = gl.arange(0, UNITS, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    thread = gl.arange(0, THREADS, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    piece = gl.expand_dims(gl.expand_dims(unit, 1), 2) * THREADS
    piece += gl.expand_dims(gl.expand_dims(thread, 0), 2)
    return piece, piece * 4 + gl.expand_dims(gl.expand_dims(word, 0), 1)


@gluon.jit
def _no_chunk(THREADS: gl.constexpr, L: gl.constexpr):
    """Return the state before a row's first chunk: maximum and sum of each thread."""
    STATE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, L))
    maximum = gl.full((THREADS,), float("-inf"), gl.float32, STATE)
    return maximum, gl.full((THREADS,), 0.0, gl.float32, STATE)


@gluon.jit
def _shift_of(maximum):
    """Return a maximum that can be subtracted: -inf - -inf would be NaN."""
    return gl.where(maximum == float("-inf"), 0.0, maximum)


@gluon.jit
def _publish(cell_ptr, maximum, sums, mask):
    """Store maximum and sum of a part in one word; never 0, for the sum is 0 with -inf alone."""
    low = maximum.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    high = sums.to(gl.int32, bitcast=True).to(gl.int64) << 32
    gl.store(cell_ptr, high | low, mask=mask)


@gluon.jit
def _ask(cells_ptr, PARTS: gl.constexpr):
    """Ask for every part of a row, one load behind the other; say how many are not there."""
    cells, missing = (), 0
    for part in gl.static_range(PARTS):
        cell = gl.load(cells_ptr + part, volatile=True)
        cells, missing = cells + (cell,), missing + gl.where(cell == 0, 1, 0)
    return cells, missing


@gluon.jit
def _gather(cells, missing, cells_ptr, PARTS: gl.constexpr, RAW: gl.constexpr):
    """Wait for every part of a row, and add them up in their order: all programs get equal bits."""
    while missing != 0:
        cells, missing = _ask(cells_ptr, PARTS)
    maximum, sums = float("-inf"), 0.0
    for part in gl.static_range(PARTS):
        part_maximum = cells[part].to(gl.int32).to(gl.float32, bitcast=True)
        part_sum = (cells[part] >> 32).to(gl.int32).to(gl.float32, bitcast=True)
        raised = gl.maximum(maximum, part_maximum)
        shift = _shift_of(raised)
        sums *= decay_of(maximum, shift, RAW)
        sums += part_sum * decay_of(part_maximum, shift, RAW)
        maximum = raised
    return maximum, sums


@gluon.jit
def _finish_row(
    numbers,  # lse · log2 e, the target's logit, the factor of the gradient, the target
    row,  # and whether there is such a row
    owned,  # first column of the part, and the next one's
    losses,  # loss and lse
    ignore_index,
    z_loss,
    V: gl.constexpr,
):
    """Store a row's loss and lse, and return what its gradient takes.

    Returns:
        Exponent, keep and sign of the gradient's words; the gradient at the target, and its column,
        or -1 where another program or nobody has it.
    """
    LOG2E: gl.constexpr = 1.4426950408889634
    lse2, z_target, scale, target = numbers
    row, lives = row
    lse = lse2 / LOG2E
    counts = target != ignore_index
    # A target outside the vocabulary is never followed: it makes loss and gradient NaN.
    inside = (target >= 0) & (target < V)
    nan_outside = gl.where(inside, 0.0, float("nan"))
    scale += nan_outside
    factor = scale * (1.0 + 2.0 * z_loss * lse)
    column = gl.where(inside, target, 0).to(gl.int32)
    owner = (column >= owned[0]) & (column < owned[1])
    loss = lse - z_target + z_loss * lse * lse + nan_outside
    gl.store(losses[0] + row, gl.where(counts, loss, 0.0), mask=lives & owner)
    gl.store(losses[1] + row, gl.where(counts, lse, 0.0), mask=lives & owner)
    exponent = lse2 - log2_of(gl.where(factor < 0.0, -factor, factor))
    keep = gl.where(counts, -1, 0)
    sign = gl.where(counts & (factor < 0.0), -2147450880, 0)  # 0x80008000
    at_target = exp2(z_target * LOG2E - lse2) * factor - scale
    return exponent, keep, sign, at_target, gl.where(lives & owner & counts & inside, column, -1)


@gluon.jit
def _store_target(grads, row, at_target, column):
    """Store a row's gradient at its target over what the walk has put there."""
    pointer = row_pointer(grads, gl.maximum(row, 0)) + gl.maximum(column, 0)
    value = at_target.to(grads[0].dtype.element_ty)
    # Whoever stored it did so before this barrier.
    barrier()
    gl.store(pointer, value, mask=column >= 0)


@gluon.jit
def _fill(fixed, group, AHEAD: gl.constexpr, CHUNKS: gl.constexpr):
    """Ask for the first chunks, and describe the next one's load as :func:`walk` wants it."""
    even, odd, inputs, cut = fixed
    logits, target_ptr, M, ignore_index, groups = inputs
    piece, offs = cut[2], cut[3]
    PIECES: gl.constexpr = piece.shape[0] * piece.shape[1]
    for step in gl.static_range(AHEAD):
        row = group + step // CHUNKS * groups
        target = target_of(target_ptr, gl.minimum(row, M - 1))
        words, pieces = loads_at(row, target, logits, M, ignore_index, cut)
        ring = odd if step % 2 else even
        copy_chunk(ring.index(step // 2), words, pieces, step % CHUNKS, piece, offs, PIECES)
    row = group + AHEAD // CHUNKS * groups
    target = target_of(target_ptr, gl.minimum(row, M - 1))
    words, pieces = loads_at(row, target, logits, M, ignore_index, cut)
    target = target_of(target_ptr, gl.minimum(row + groups, M - 1))
    return row, gl.to_tensor(AHEAD % CHUNKS), words, pieces, target


@gluon.jit(do_not_specialize=["M", "T", "ignore_index"])
def cross_entropy_ring_kernel(
    logits_ptr,  # [B, T, V] bf16, of a softmax also fp16; rows 16-byte aligned
    target_ptr,  # [M] int64; M = B · T
    scale_ptr,  # [M] fp32 factors of the rows' gradients
    loss_ptr,  # [M] fp32, written
    lse_ptr,  # [M] fp32, written
    grad_ptr,  # [B, T, V] as logits, which it may be
    cells_ptr,  # [M, PARTS] int64, 0 before; None with one part
    M,
    T,
    stride_b,
    stride_t,
    stride_gb,
    stride_gt,
    ignore_index,
    z_loss,
    V: gl.constexpr,  # a multiple of 8
    BATCHED: gl.constexpr,
    PARTS: gl.constexpr,
    CHUNKS: gl.constexpr,  # of a part, even
    LAG: gl.constexpr,  # even
    SLOTS: gl.constexpr,  # even
    UNITS: gl.constexpr,  # 16-byte pieces of a chunk a thread
    WARPS: gl.constexpr,
):
    L: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, WARPS, 1], [2, 1, 0])
    THREADS: gl.constexpr = 32 * WARPS
    PIECES: gl.constexpr = UNITS * THREADS
    COLUMNS: gl.constexpr = CHUNKS * PIECES * 8
    AHEAD: gl.constexpr = SLOTS - 1 - CHUNKS - LAG

    part = gl.program_id(0) % PARTS
    group = gl.program_id(0) // PARTS
    groups = gl.num_programs(0) // PARTS
    rows = (M - group + groups - 1) // groups
    logits = (logits_ptr, T if BATCHED else None, stride_b, stride_t)
    grads = (grad_ptr, T if BATCHED else None, stride_gb, stride_gt)
    piece, offs = _pieces(UNITS, THREADS, L)
    limit = gl.minimum(gl.maximum(V // 8 - part * (CHUNKS * PIECES), 0), CHUNKS * PIECES)
    cut = (part * COLUMNS, limit, piece, offs)
    inputs = (logits, target_ptr, M, ignore_index, groups)

    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    even = gl.allocate_shared_memory(gl.int32, [SLOTS // 2, UNITS, THREADS, 4], SHARED)
    odd = gl.allocate_shared_memory(gl.int32, [SLOTS // 2, UNITS, THREADS, 4], SHARED)
    fixed = (even, odd, inputs, cut)
    loads = _fill(fixed, group, AHEAD, CHUNKS)
    slots = (gl.to_tensor(0), gl.to_tensor(AHEAD // 2 + 1), gl.to_tensor(AHEAD // 2))

    # Of the row whose sums are taken, and of the one before, whose gradient is.
    target = target_of(target_ptr, group)
    # A value of its own: Triton takes a variable for constant in a loop whose first pass gives it
    # the value it comes in with.
    old_target = target_of(target_ptr, group)
    old_z, old_scale = gl.to_tensor(0.0), gl.to_tensor(0.0)
    old_maximum, old_sum = gl.to_tensor(0.0), gl.to_tensor(1.0)
    RAW: gl.constexpr = target_ptr is None
    gradient = (gl.to_tensor(0.0), gl.to_tensor(0.0 if RAW else 0), gl.to_tensor(0))
    at_target, column = gl.to_tensor(0.0), gl.to_tensor(-1)
    for i in range(rows + (2 if LAG else 1)):
        row = group + i * groups
        here = gl.minimum(row, M - 1)
        # Used after the walk: on their way in its time. In place, z comes before its gradient,
        # which the owner stores itself one row later.
        z_target, scale = old_z, old_scale
        if target_ptr is not None:
            safe = gl.where((target >= 0) & (target < V), target, 0)
            z_target = gl.load(row_pointer(logits, here) + safe).to(gl.float32)
            scale = gl.load(scale_ptr + here)
        next_target = target_of(target_ptr, gl.minimum(row + groups, M - 1))
        state = _no_chunk(THREADS, L)
        if LAG > 0:
            # The end of the row two before this one.
            last = row - 2 * groups
            to = (part_words(grads, gl.maximum(last, 0), cut[0]), gl.where(last >= 0, limit, 0))
            pairs = gl.where(i < rows + 2, LAG // 2, 0)
            slots, state, loads = walk(
                pairs, slots, state, loads, 0, CHUNKS - LAG, to + gradient, fixed, AHEAD, CHUNKS, L
            )
        lives = (i > 0) & (i <= rows)
        old = gl.minimum(gl.maximum(row - groups, 0), M - 1)
        if PARTS > 1:
            parts_ptr = cells_ptr + old * PARTS
            cells, missing = _ask(parts_ptr, PARTS)
        if target_ptr is not None:
            _store_target(grads, row - 2 * groups, at_target, column)
        if PARTS > 1:
            missing = gl.where(lives, missing, 0)
            old_maximum, old_sum = _gather(cells, missing, parts_ptr, PARTS, RAW)
        if RAW:
            gradient = (_shift_of(old_maximum), gl.log2(old_sum), gl.to_tensor(0))
        else:
            lse2 = _shift_of(old_maximum) + gl.log2(old_sum)
            exponent, keep, sign, at_target, column = _finish_row(
                (lse2, old_z, old_scale, old_target), (old, lives), (cut[0], cut[0] + COLUMNS),
                (loss_ptr, lse_ptr), ignore_index, z_loss, V,
            )  # fmt: skip
            gradient = (exponent, keep, sign)
        to = (part_words(grads, old, cut[0]), gl.where(lives, limit, 0))
        pairs = gl.where(i <= rows, (CHUNKS - LAG) // 2, 0)
        slots, state, loads = walk(
            pairs, slots, state, loads, LAG, 0, to + gradient, fixed, AHEAD, CHUNKS, L
        )
        old_maximum = gl.max(state[0], 0)
        old_sum = gl.sum(state[1] * decay_of(state[0], _shift_of(old_maximum), RAW), 0)
        if PARTS > 1:
            _publish(cells_ptr + here * PARTS + part, old_maximum, old_sum, row < M)
        old_z, old_scale, old_target, target = z_target, scale, target, next_target
    async_copy.wait_group(0)
    if LAG == 0 and target_ptr is not None:
        _store_target(grads, group + (rows - 1) * groups, at_target, column)
