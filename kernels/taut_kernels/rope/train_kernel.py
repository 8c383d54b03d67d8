"""Jit function of :mod:`.train`: the rotation into new tensors."""

# ruff: noqa: SIM102 (branches on constants fall at compile time)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.rope.rope_kernel import load_angles, load_pairs, store_pairs


@triton.jit(do_not_specialize=["T"])
def rope_train_kernel(
    q_ptr, k_ptr, cache_ptr, positions_ptr,
    new_q_ptr,  # [T, HQ, D], contiguous
    new_k_ptr,  # [T, HK, D], contiguous, or None
    T,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,  # HALF up to a power of two
    REST: tl.constexpr,  # D - 2 * HALF up to a power of two; 0: every column turns
    NEOX: tl.constexpr,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Operands as of :func:`.rope_kernel`.

    One program turns HEADS heads, all of q or all of k, of one token.
    """
    Q_BLOCKS: tl.constexpr = (HQ + HEADS - 1) // HEADS
    BLOCKS: tl.constexpr = Q_BLOCKS + (HK + HEADS - 1) // HEADS
    block = tl.program_id(0) % BLOCKS
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    heads = block * HEADS + tl.arange(0, HEADS)
    mask_h = heads < HQ
    source, target = q_ptr, new_q_ptr
    stride_t, stride_h, stride_new = stride_qt, stride_qh, token * HQ * D
    # Two ifs: the outer one falls at compile time, and without k there is no k_ptr to name.
    if HK > 0:
        if block >= Q_BLOCKS:
            heads = (block - Q_BLOCKS) * HEADS + tl.arange(0, HEADS)
            mask_h = heads < HK
            source, target = k_ptr, new_k_ptr
            stride_t, stride_h, stride_new = stride_kt, stride_kh, token * HK * D
    rows = source + token * stride_t + heads.to(tl.int64)[:, None] * stride_h
    new_rows = target + stride_new + heads[:, None] * D
    # The position first, the angles last: they wait for it.
    position = tl.load(positions_ptr + token)
    a, b = load_pairs(rows, mask_h, HALF, WIDTH, NEOX)
    if REST > 0:
        columns = 2 * HALF + tl.arange(0, REST)
        mask = mask_h[:, None] & (columns < D)[None, :]
        rest = tl.load(rows + columns[None, :], mask=mask, other=0.0)
        tl.store(new_rows + columns[None, :], rest, mask=mask)
    cos, sin = load_angles(cache_ptr, position, HALF, WIDTH)
    if INVERSE:
        sin = -sin
    store_pairs(new_rows, a * cos - b * sin, b * cos + a * sin, mask_h, HALF, WIDTH, NEOX)
