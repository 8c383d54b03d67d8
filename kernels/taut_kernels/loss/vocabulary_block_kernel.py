"""Jit functions of cross entropy over blocks of the vocabulary: [rows, columns] at a time.

A block's width is a constant: as a number Triton knows nothing about, it would make every load and
store as narrow as an element (8192 × 3584 on an H200 took 39 and 93 µs, their bytes 14 and 29).
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.loss.cross_entropy_kernel import gradient
from taut_kernels.loss.softmax_jit import capped


@triton.jit(do_not_specialize=["start"])
def block_statistics_kernel(
    logits_ptr,  # [R, columns]
    target_ptr,  # [R] int64
    maximum_ptr,  # [R] fp32, of z · log2 e, updated, as are the next three
    sums_ptr,  # [R] fp32: Σ 2^(z · log2 e − maximum)
    z_target_ptr,  # [R] fp32
    z_sums_ptr,  # [R] fp32
    stride_m,
    start,
    softcap,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # ≥ COLUMNS
):
    """Take columns start.. of the vocabulary into the running statistics; one row a program."""
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    mask = offs < COLUMNS
    z = tl.load(logits_ptr + row.to(tl.int64) * stride_m + offs, mask=mask, other=float("-inf"))
    z = z.to(tl.float32)
    if HAS_SOFTCAP:
        z = tl.where(mask, capped(z, softcap, True), float("-inf"))
    target = tl.load(target_ptr + row) - start
    if (target >= 0) & (target < COLUMNS):
        tl.store(z_target_ptr + row, tl.sum(tl.where(offs == target.to(tl.int32), z, 0.0), axis=0))
    if HAS_SMOOTHING:
        z_sum = tl.sum(tl.where(mask, z, 0.0), axis=0)
        tl.store(z_sums_ptr + row, tl.load(z_sums_ptr + row) + z_sum)
    z2 = z * LOG2E
    maximum = tl.load(maximum_ptr + row)
    raised = tl.maximum(maximum, tl.max(z2, axis=0))
    shift = tl.where(raised == float("-inf"), 0.0, raised)
    block_sum = tl.sum(tl.exp2(z2 - shift), axis=0)
    sums = tl.load(sums_ptr + row) * tl.exp2(maximum - shift) + block_sum
    tl.store(maximum_ptr + row, raised)
    tl.store(sums_ptr + row, sums)


@triton.jit(do_not_specialize=["start", "ignore_index"])
def block_gradient_kernel(
    logits_ptr,  # [R, columns]
    grad_ptr,  # [R, columns], may be logits
    target_ptr,  # [R] int64
    scale_ptr,  # [R] fp32
    lse_ptr,  # [R] fp32
    stride_m,
    stride_gm,
    start,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    V: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # ≥ COLUMNS
):
    """Write the gradient of columns start.. of the vocabulary; one row a program."""
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    mask = offs < COLUMNS
    target = tl.load(target_ptr + row)
    inside = (target >= 0) & (target < V)
    scale = tl.load(scale_ptr + row) + tl.where(inside, 0.0, float("nan"))
    lse = tl.load(lse_ptr + row)
    z = tl.load(logits_ptr + row.to(tl.int64) * stride_m + offs, mask=mask, other=0.0)
    z = capped(z.to(tl.float32), softcap, HAS_SOFTCAP)
    g = gradient(
        z, offs == (target - start).to(tl.int32), lse, scale, label_smoothing, z_loss, softcap, V,
        HAS_SMOOTHING, HAS_SOFTCAP,
    )  # fmt: skip
    # Not only times a scale of 0: an ignored row may hold infinities.
    g = tl.where(target == ignore_index, 0.0, g)
    grad_row = grad_ptr + row.to(tl.int64) * stride_gm
    tl.store(grad_row + offs, g.to(grad_ptr.dtype.element_ty), mask=mask)
