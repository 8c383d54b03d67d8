"""Jit functions around cross entropy's kernel: weights of rows, and the loss they give."""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M", "ignore_index"])
def row_weights_kernel(
    target_ptr,  # [M] int64
    weights_ptr,  # [M] fp32, written
    M,
    ignore_index,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weigh rows that count with 1 or, for a mean, 1 / their number, others with 0.

    Every program counts all rows and stores a block: one launch instead of five.
    """
    offs = tl.arange(0, BLOCK)
    weight = 1.0
    if MEAN:
        found = tl.zeros((BLOCK,), dtype=tl.int32)
        for start in tl.range(0, M, BLOCK):
            target = tl.load(target_ptr + start + offs, mask=start + offs < M, other=ignore_index)
            found += (target != ignore_index).to(tl.int32)
        weight = 1.0 / tl.maximum(tl.sum(found, axis=0), 1).to(tl.float32)
    offs += tl.program_id(0) * BLOCK
    target = tl.load(target_ptr + offs, mask=offs < M, other=ignore_index)
    tl.store(weights_ptr + offs, tl.where(target != ignore_index, weight, 0.0), mask=offs < M)


@triton.jit(do_not_specialize=["M"])
def weighted_sum_kernel(
    losses_ptr,  # [M] fp32
    weights_ptr,  # [M] fp32
    loss_ptr,  # one fp32, written
    M,
    BLOCK: tl.constexpr,
):
    """Add up the rows' losses times their weights, in one program: the same bits every time."""
    offs = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(0, M, BLOCK):
        mask = start + offs < M
        loss = tl.load(losses_ptr + start + offs, mask=mask, other=0.0)
        total += loss * tl.load(weights_ptr + start + offs, mask=mask, other=0.0)
    tl.store(loss_ptr, tl.sum(total, axis=0))
