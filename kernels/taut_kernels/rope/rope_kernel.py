"""Jit functions of :mod:`.op`."""

# ruff: noqa: RUF005, SIM102 (Triton's front end adds tuples and does not unpack them; a kernel is one
# function: its branches fall at compile time)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.rowwise.chunk_jit import start_early


@triton.jit
def load_pairs(rows, mask_h, HALF: tl.constexpr, WIDTH: tl.constexpr, NEOX: tl.constexpr):
    """Load both members of every pair, each [HEADS, WIDTH]."""
    if NEOX:
        offs = tl.arange(0, WIDTH)
        mask = mask_h[:, None] & (offs < HALF)[None, :]
        a = tl.load(rows + offs[None, :], mask=mask, other=0.0)
        b = tl.load(rows + HALF + offs[None, :], mask=mask, other=0.0)
    else:
        offs = tl.arange(0, 2 * WIDTH)
        mask = mask_h[:, None] & (offs < 2 * HALF)[None, :]
        pairs = tl.load(rows + offs[None, :], mask=mask, other=0.0)
        a, b = tl.split(tl.reshape(pairs, (rows.shape[0], WIDTH, 2)))
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def store_pairs(rows, a, b, mask_h, HALF: tl.constexpr, WIDTH: tl.constexpr, NEOX: tl.constexpr):
    """Store what :func:`load_pairs` loaded, in the type of the target."""
    element: tl.constexpr = rows.dtype.element_ty
    if NEOX:
        offs = tl.arange(0, WIDTH)
        mask = mask_h[:, None] & (offs < HALF)[None, :]
        tl.store(rows + offs[None, :], a.to(element), mask=mask)
        tl.store(rows + HALF + offs[None, :], b.to(element), mask=mask)
    else:
        offs = tl.arange(0, 2 * WIDTH)
        mask = mask_h[:, None] & (offs < 2 * HALF)[None, :]
        pairs = tl.reshape(tl.join(a.to(element), b.to(element)), (rows.shape[0], 2 * WIDTH))
        tl.store(rows + offs[None, :], pairs, mask=mask)


@triton.jit
def load_angles(cache_ptr, position, HALF: tl.constexpr, WIDTH: tl.constexpr):
    """Load the cosines and sines of one position, each [1, WIDTH] fp32."""
    offs = tl.arange(0, WIDTH)
    row = cache_ptr + position * 2 * HALF
    cos = tl.load(row + offs, mask=offs < HALF, other=0.0, eviction_policy="evict_last")
    sin = tl.load(row + HALF + offs, mask=offs < HALF, other=0.0, eviction_policy="evict_last")
    return cos.to(tl.float32)[None, :], sin.to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["T"])
def rope_kernel(
    q_ptr,  # [T, HQ, D], a head's columns next to each other
    k_ptr,  # [T, HK, D] or None
    cache_ptr,  # [P, 2 * HALF], contiguous
    positions_ptr,  # [T] int64
    new_q_ptr,  # [T, HQ, D], heads contiguous; None: in place
    new_k_ptr,  # [T, HK, D], likewise; None: in place, or no k
    T,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_nqt,
    stride_nkt,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,  # 0: in place, where the other columns are not looked at
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,  # HALF up to a power of two
    REST: tl.constexpr,  # D - 2 * HALF up to a power of two; 0: no column is copied
    NEOX: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program turns HEADS heads, all of q or all of k, of TOKENS tokens."""
    # Nothing is touched before the wait: in place q and k are what the kernel in front wrote, and
    # new memory may be what it still reads.
    start_early(PDL)
    Q_BLOCKS: tl.constexpr = (HQ + HEADS - 1) // HEADS
    BLOCKS: tl.constexpr = Q_BLOCKS + (HK + HEADS - 1) // HEADS
    pid = tl.program_id(0)
    block = pid % BLOCKS
    first = (pid // BLOCKS).to(tl.int64) * TOKENS
    heads = block * HEADS + tl.arange(0, HEADS)
    mask_h = heads < HQ
    base, target = q_ptr, q_ptr if D == 0 else new_q_ptr
    stride_t, stride_h, stride_nt = stride_qt, stride_qh, stride_nqt
    # Two ifs: the outer one falls at compile time, and without k there is no k_ptr to name.
    if HK > 0:
        if block >= Q_BLOCKS:
            heads = (block - Q_BLOCKS) * HEADS + tl.arange(0, HEADS)
            mask_h = heads < HK
            base, target = k_ptr, k_ptr if D == 0 else new_k_ptr
            stride_t, stride_h, stride_nt = stride_kt, stride_kh, stride_nkt
    head_rows = base + heads.to(tl.int64)[:, None] * stride_h
    # As one value: in place both are the same addresses, computed once.
    new_rows = head_rows if D == 0 else target + heads.to(tl.int64)[:, None] * D
    new_stride = stride_t if D == 0 else stride_nt
    if REST > 0:
        columns = 2 * HALF + tl.arange(0, REST)
        mask_rest = mask_h[:, None] & (columns < D)[None, :]
    # Angles come last: they wait for their position and, on the way to the pairs' layout, for a
    # barrier, which must not hold up the loads of the heads.
    positions = ()
    pairs = ()
    rests = ()
    angles = ()
    for i in tl.static_range(TOKENS):
        # The last program's missing tokens repeat the last one's loads and are not stored.
        token = tl.minimum(first + i, T - 1)
        positions = positions + (tl.load(positions_ptr + token),)
        rows = head_rows + token * stride_t
        pairs = pairs + (load_pairs(rows, mask_h, HALF, WIDTH, NEOX),)
        if REST > 0:
            rests = rests + (tl.load(rows + columns[None, :], mask=mask_rest, other=0.0),)
    for i in tl.static_range(TOKENS):
        angles = angles + (load_angles(cache_ptr, positions[i], HALF, WIDTH),)
    for i in tl.static_range(TOKENS):
        a, b = pairs[i]
        cos, sin = angles[i]
        rows = new_rows + (first + i) * new_stride
        # As a tensor: the interpreter refuses a mask made of a tensor and a run-time scalar.
        tokens = tl.zeros((HEADS,), dtype=tl.int64) + first + i
        stored = mask_h & (tokens < T)
        store_pairs(rows, a * cos - b * sin, b * cos + a * sin, stored, HALF, WIDTH, NEOX)
        if REST > 0:
            tl.store(rows + columns[None, :], rests[i], mask=mask_rest & stored[:, None])
