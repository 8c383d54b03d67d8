"""One step of the ring kernel of cross entropy: a chunk in, a chunk's sums, a chunk's gradient out.

See :mod:`.cross_entropy_ring_kernel`. Two bf16 logits are one 32-bit word: its low
half shifted up, and its high half alone, are fp32 numbers as they are. A softmax may have two fp16
numbers in a word instead, which are converted.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,operator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from taut_kernels.hopper import barrier, copy


@gluon.jit
def exp2(x):
    """Return 2^x in one instruction; results below 2^-126 are 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def log2_of(x):
    """Return log2 x in one instruction, 2^-22 off: for factors of results in 16 bits."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _larger_pair(a, b):
    return gl.inline_asm_elementwise(
        "max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _larger_half_pair(a, b):
    return gl.inline_asm_elementwise(
        "max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _largest(words, AXIS: gl.constexpr, FP16: gl.constexpr):
    """Return the larger of each half along an axis."""
    if FP16:
        found = gl.reduce(words, AXIS, _larger_half_pair)
    else:
        found = gl.reduce(words, AXIS, _larger_pair)
    return found


@gluon.jit
def _rounded_pair(high, low, FP16: gl.constexpr):
    TEXT: gl.constexpr = f"cvt.rn.{'f16' if FP16 else 'bf16'}x2.f32 $0, $1, $2;"
    return gl.inline_asm_elementwise(TEXT, "=r,f,f", [high, low], gl.int32, is_pure=True, pack=1)


@gluon.jit
def _numbers(words, FP16: gl.constexpr):
    """Return the low and the high number of each word, in fp32; FP16: of fp16."""
    if FP16:
        low, high = gl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }",
            "=f,=f,r",
            [words],
            (gl.float32, gl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        low = (words << 16).to(gl.float32, bitcast=True)
        high = (words & -65536).to(gl.float32, bitcast=True)
    return low, high


@gluon.jit
def row_pointer(tensor, row):
    """Return the pointer to a row of (pointer, T, stride_b, stride_t): [B, T, V], or T None."""
    if tensor[1] is None:
        pointer = tensor[0] + row.to(gl.int64) * tensor[3]
    else:
        batch, token = (row // tensor[1]).to(gl.int64), (row % tensor[1]).to(gl.int64)
        pointer = tensor[0] + batch * tensor[2] + token * tensor[3]
    return pointer


@gluon.jit
def target_of(target_ptr, row):
    """Load a row's target; 0 without targets, which is a softmax."""
    return gl.to_tensor(0) if target_ptr is None else gl.load(target_ptr + row)


@gluon.jit
def part_words(tensor, row, first):
    """Return the pointer to a program's part of a row, as words."""
    return (row_pointer(tensor, row) + first).to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def loads_at(row, target, logits, M, ignore_index, cut):
    """Describe a row's loads: words, and how many pieces of them are read: none of ignored rows."""
    words = part_words(logits, gl.minimum(row, M - 1), cut[0])
    return words, gl.where((row < M) & (target != ignore_index), cut[1], 0)


@gluon.jit
def copy_chunk(slot, words, pieces, chunk, piece, offs, PIECES: gl.constexpr):
    """Ask for a chunk; what lies behind the last piece becomes 0."""
    left = pieces - chunk * PIECES
    copy(slot, words + chunk * (PIECES * 4) + offs, mask=piece < left, cache_modifier=".cg")
    async_copy.commit_group()


@gluon.jit
def powers_of(x, shift, RAW: gl.constexpr):
    """Return e^(x − shift): of logits and a raw shift, or of logits and a shift · log2 e.

    The second is one instruction less an element, and as good for logits of models. A softmax has
    masks of −1e9 or the lowest number there is, for whose product with log2 e fp32 has no digits.
    """
    LOG2E: gl.constexpr = 1.4426950408889634
    return exp2((x - shift) * LOG2E) if RAW else exp2(x * LOG2E - shift)


@gluon.jit
def decay_of(old, new, RAW: gl.constexpr):
    """Return what raising a maximum does to the sums below it; both as :func:`powers_of` says."""
    LOG2E: gl.constexpr = 1.4426950408889634
    return exp2((old - new) * LOG2E) if RAW else exp2(old - new)


@gluon.jit
def _add_chunk(words, counts, maximum, sums, RAW: gl.constexpr, FP16: gl.constexpr):
    """Take a chunk into the running softmax of each thread.

    Args:
        words: [UNITS, THREADS, 4].
        counts: [UNITS, THREADS] which pieces of four words there are.
        maximum: [THREADS] largest logit so far, as :func:`powers_of` says.
        sums: [THREADS] Σ e^(logit − maximum).
        RAW: see :func:`powers_of`.
        FP16: words hold fp16.
    """
    LOG2E: gl.constexpr = 1.0 if RAW else 1.4426950408889634
    # -inf twice: 0xfc00fc00, 0xff80ff80.
    LOWEST: gl.constexpr = -67044352 if FP16 else -8323200
    largest = gl.where(counts, _largest(words, 2, FP16), LOWEST)
    low, high = _numbers(_largest(largest, 0, FP16), FP16)
    raised = gl.maximum(maximum, gl.maximum(low, high) * LOG2E)
    # A thread that starts with -inf alone: -inf - -inf would be NaN.
    shift = gl.where(raised == float("-inf"), 0.0, raised)
    shifts = gl.expand_dims(gl.expand_dims(shift, 0), 2)
    low, high = _numbers(words, FP16)
    powers = powers_of(low, shifts, RAW) + powers_of(high, shifts, RAW)
    total = gl.sum(gl.where(counts, gl.sum(powers, 2), 0.0), 0)
    return raised, sums * decay_of(maximum, shift, RAW) + total


@gluon.jit
def _gradient(words, exponent, keep, sign):
    """Return the gradient's words: p · |factor|, 0 of ignored rows, with the factor's sign."""
    LOG2E: gl.constexpr = 1.4426950408889634
    low, high = _numbers(words, False)
    low = exp2(low * LOG2E - exponent)
    high = exp2(high * LOG2E - exponent)
    return (_rounded_pair(high, low, False) & keep) ^ sign


@gluon.jit
def _softmax(words, maximum, log2_sum, FP16: gl.constexpr):
    """Return the words of e^(x − maximum) / sum."""
    LOG2E: gl.constexpr = 1.4426950408889634
    low, high = _numbers(words, FP16)
    low = exp2((low - maximum) * LOG2E - log2_sum)
    high = exp2((high - maximum) * LOG2E - log2_sum)
    return _rounded_pair(high, low, FP16)


@gluon.jit
def _step(
    ring,
    next_ring,
    slot,
    old_slot,
    next_slot,  # the one to be filled
    state,
    loads,
    chunk,
    old_chunk,
    gradient,
    inputs,
    cut,
    AHEAD: gl.constexpr,
    CHUNKS: gl.constexpr,
    L: gl.constexpr,
):
    """Read one chunk for the sums and an older one for its gradient, and ask for another.

    Parameters are those of :func:`walk`.
    """
    piece, offs = cut[2], cut[3]
    PIECES: gl.constexpr = piece.shape[0] * piece.shape[1]
    async_copy.wait_group(AHEAD - 1)
    # Everyone's pieces have arrived, and everyone has read the slot to be filled.
    barrier()
    row, load_chunk, source, pieces, target = loads
    copy_chunk(next_ring.index(next_slot), source, pieces, load_chunk, piece, offs, PIECES)
    load_chunk += 1
    if load_chunk == CHUNKS:
        logits, target_ptr, M, ignore_index, groups = inputs
        load_chunk = 0
        row += groups
        source, pieces = loads_at(row, target, logits, M, ignore_index, cut)
        target = target_of(target_ptr, gl.minimum(row + groups, M - 1))
    here = ring.index(slot).load(L)
    old = ring.index(old_slot).load(L)
    FLAT: gl.constexpr = gl.SliceLayout(2, L)
    counts = gl.reshape(piece < cut[1] - chunk * PIECES, [piece.shape[0], piece.shape[1]])
    counts = gl.convert_layout(counts, FLAT, assert_trivial=True)
    RAW: gl.constexpr = inputs[1] is None
    FP16: gl.constexpr = inputs[0][0].dtype.element_ty == gl.float16
    maximum, sums = _add_chunk(here, counts, state[0], state[1], RAW, FP16)
    if RAW:
        words = _softmax(old, gradient[2], gradient[3], FP16)
    else:
        words = _gradient(old, gradient[2], gradient[3], gradient[4])
    gl.store(
        gradient[0] + old_chunk * (PIECES * 4) + offs,
        words,
        mask=piece < gradient[1] - old_chunk * PIECES,
    )
    return (maximum, sums), (row, load_chunk, source, pieces, target)


@gluon.jit
def walk(
    pairs,  # of steps
    slots,  # the one the sums take, the one the gradient takes, and the one before that
    state,  # maximum and sums of each thread
    loads,  # the next chunk to ask for: row, chunk, its words and pieces, the next row's target
    chunk,  # first one for the sums
    old_chunk,  # first one for the gradient
    gradient,  # its words, pieces that are stored, and exponent, keep and sign; of a softmax
    # maximum and log2 of the sum
    fixed,  # rings of even and of odd steps, inputs, cut: see the kernel
    AHEAD: gl.constexpr,  # chunks on their way
    CHUNKS: gl.constexpr,  # of a part
    L: gl.constexpr,
):
    """Walk over pairs of steps; return slots, state and loads for the next."""
    even, odd, inputs, cut = fixed
    slot, old_slot, before = slots
    HALF: gl.constexpr = even.shape[0]
    for pair in range(pairs):
        # What a step fills was read in the step before it, in the other allocation: a step reads
        # the one and fills the other, and Triton, which tells only allocations apart, sets no
        # barrier between.
        at, old = chunk + 2 * pair, old_chunk + 2 * pair
        state, loads = _step(
            even, odd, slot, old_slot, before, state, loads, at, old, gradient, inputs, cut, AHEAD,
            CHUNKS, L,
        )  # fmt: skip
        state, loads = _step(
            odd, even, slot, old_slot, old_slot, state, loads, at + 1, old + 1, gradient, inputs,
            cut, AHEAD, CHUNKS, L,
        )  # fmt: skip
        before = old_slot
        slot = gl.where(slot + 1 == HALF, 0, slot + 1)
        old_slot = gl.where(old_slot + 1 == HALF, 0, old_slot + 1)
    return (slot, old_slot, before), state, loads
