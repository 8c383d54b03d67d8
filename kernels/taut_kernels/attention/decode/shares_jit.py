"""Jit functions of :mod:`.op`: which keys a program reads.

Either the grid says which sequence and which of its parts (:func:`key_span`), or every program
reads the lengths of all sequences and finds its own part among theirs (:func:`find_part`): then the
work is laid out evenly however long each sequence is, and a CUDA graph's grid fits every batch.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_key(context, window, QUERIES: tl.constexpr, WINDOW: tl.constexpr,
              BLOCK_KEYS: tl.constexpr):  # fmt: skip
    """Return the first key that any query sees, down to a multiple of BLOCK_KEYS."""
    first = context * 0
    if WINDOW:
        first = tl.maximum(context - QUERIES + 1 - window, 0) // BLOCK_KEYS * BLOCK_KEYS
    return first


@triton.jit
def key_span(context, window, splits, min_keys, QUERIES: tl.constexpr, WINDOW: tl.constexpr,
             BLOCK_KEYS: tl.constexpr):  # fmt: skip
    """Return first key (a multiple of BLOCK_KEYS), keys a split, and splits that have any."""
    first = first_key(context, window, QUERIES, WINDOW, BLOCK_KEYS)
    keys = context - first
    chunk = tl.maximum((keys + splits - 1) // splits, min_keys)
    chunk = (chunk + BLOCK_KEYS - 1) // BLOCK_KEYS * BLOCK_KEYS
    # One program writes zeros where there is no key.
    return first, chunk, tl.maximum((keys + chunk - 1) // chunk, 1)


@triton.jit
def load_contexts(contexts_ptr, offs, sequences, most_keys):
    """Load the sequences' keys, those below 0 and beyond the table cut; 0 beyond the batch."""
    context = tl.load(contexts_ptr + offs, mask=offs < sequences, other=0)
    return tl.minimum(tl.maximum(context, 0), most_keys)


@triton.jit
def steps_of(context, window, QUERIES: tl.constexpr, WINDOW: tl.constexpr,
             BLOCK_KEYS: tl.constexpr):  # fmt: skip
    """Return how many tiles of keys the queries see."""
    first = first_key(context, window, QUERIES, WINDOW, BLOCK_KEYS)
    return (context - first + BLOCK_KEYS - 1) // BLOCK_KEYS


@triton.jit
def parts_of(steps, part):
    """Return how many parts of at most `part` steps there must be, at least 1."""
    return tl.maximum((steps + part - 1) // part, 1)


@triton.jit
def find_part(
    contexts_ptr,  # [sequences] int32
    sequences,
    shares,
    min_keys,
    most_keys,
    window,
    place,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_B: tl.constexpr,  # at least sequences, a power of two
):
    """Find the part of a sequence that stands at `place`.

    Return sequence (-1: none), number of the part, parts of the sequence, its context, first key (a
    multiple of BLOCK_KEYS) and the key to stop at.

    All keys of the batch, in steps, make up `total`; a part is total / shares, rounded up, or
    min_keys. A sequence of s steps has n = max(1, ⌈s / part⌉) parts, equal to a step. There is a
    place for all: n ≤ s / part + 1, the sum of the first terms is total / part ≤ shares, that of
    the second is the number of sequences, and the grid has shares + sequences places.

    Sequences of half a part or more come first, in their order, then the short ones, one place
    each, so that what starts last is soon done; then places without work.
    """
    offs_b = tl.arange(0, BLOCK_B)
    real = offs_b < sequences
    context = load_contexts(contexts_ptr, offs_b, sequences, most_keys)
    steps = steps_of(context, window, QUERIES, WINDOW, BLOCK_KEYS)
    least = (min_keys + BLOCK_KEYS - 1) // BLOCK_KEYS
    part = tl.maximum((tl.sum(steps, 0) + shares - 1) // shares, least)
    parts = parts_of(steps, part)
    long = 2 * steps >= part
    # Two counts in one number: parts of long sequences in its high half, short ones in its low.
    counts = tl.where(real, tl.where(long, parts << 16, 1), 0)
    ends = tl.cumsum(counts, 0)
    of_long = tl.sum(counts, 0) >> 16
    begin = tl.where(long, (ends >> 16) - parts, of_long + (ends & 0xFFFF) - 1)
    mine = real & (begin <= place) & (place < begin + parts)
    found = tl.max(tl.where(mine, (place - begin) * BLOCK_B + offs_b, -1), 0)
    batch = tl.where(found < 0, -1, found % BLOCK_B)
    split = found // BLOCK_B
    # Again for the one sequence: a load from L1 instead of reductions.
    context = load_contexts(contexts_ptr, tl.maximum(batch, 0), sequences, most_keys)
    steps = steps_of(context, window, QUERIES, WINDOW, BLOCK_KEYS)
    active = parts_of(steps, part)
    each, more = steps // active, steps % active
    before = split * each + tl.minimum(split, more)
    first = first_key(context, window, QUERIES, WINDOW, BLOCK_KEYS) + before * BLOCK_KEYS
    last = tl.minimum(first + (each + (split < more)) * BLOCK_KEYS, context)
    return batch, split, active, context, first, last
