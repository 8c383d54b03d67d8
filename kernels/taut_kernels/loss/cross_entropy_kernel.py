"""Jit functions of cross entropy: whole rows, and the rows' parts in blocks of the vocabulary."""

# ruff: noqa: C901 (a kernel is one function: its branches fall at compile time)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.loss.softmax_jit import capped, log2_sum, running_start, running_step, store_zeros


@triton.jit
def gradient(
    z, is_target, lse, scale, label_smoothing, z_loss, softcap, V: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Return scale · ∂loss/∂logits of one row's capped logits ``z`` [BLOCK] fp32.

    ``is_target`` [BLOCK] says which of them is the target's.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    p = tl.exp2(z * LOG2E - lse * LOG2E)
    g = p * (1.0 + 2.0 * z_loss * lse)
    if HAS_SMOOTHING:
        g = g - label_smoothing / V
    g = tl.where(is_target, g - (1.0 - label_smoothing), g)
    if HAS_SOFTCAP:
        tanh = z / softcap
        g = g * (1.0 - tanh * tanh)
    return g * scale


@triton.jit
def row_loss(lse, z_target, z_sum, label_smoothing, z_loss, V: tl.constexpr):
    """Return the loss of a row from its log-sum-exp, the target's logit and the logits' sum."""
    smoothed = (1.0 - label_smoothing) * z_target + label_smoothing * (z_sum / V)
    return lse - smoothed + z_loss * lse * lse


@triton.jit
def _block(row_ptr, start, offs, step, V: tl.constexpr):
    """Load a block of a row; −inf beyond its end."""
    offs_v = start + offs
    return tl.load(row_ptr + offs_v * step, mask=offs_v < V, other=float("-inf"))


# What a call does not share with the next of its form is not specialised on.
@triton.jit(do_not_specialize=["T", "stride_n", "ignore_index"])
def cross_entropy_kernel(
    logits_ptr,  # [B, T, V]
    target_ptr,  # [B · T] int64
    scale_ptr,  # [B · T] fp32 factors of the rows' gradients, or None for no gradient
    loss_ptr,  # [B · T] fp32, written; None where LSE is given
    lse_ptr,  # [B · T] fp32, written, or read where HAS_LSE
    grad_ptr,  # [B, T, V], may be logits; or None
    T,
    stride_b,
    stride_t,
    stride_gb,
    stride_gt,
    stride_n,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    V: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    STRIDED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row a program: log-sum-exp in a first pass, the gradient in a second (from L2).

    STAGES: 1 loads a block when it is needed, 2 one block ahead into registers, more go through
    shared memory.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0)
    batch = (row // T).to(tl.int64)
    token = (row % T).to(tl.int64)
    logits_row = logits_ptr + batch * stride_b + token * stride_t
    grad_row = grad_ptr
    if grad_ptr is not None:
        grad_row = grad_ptr + batch * stride_gb + token * stride_gt
    step = 1
    if STRIDED:
        step = stride_n.to(tl.int64)
    target = tl.load(target_ptr + row)
    offs = tl.arange(0, BLOCK)
    if target == ignore_index:
        if not HAS_LSE:
            tl.store(loss_ptr + row, 0.0)
            tl.store(lse_ptr + row, 0.0)
        if grad_ptr is not None:
            store_zeros(grad_row, offs, V, BLOCK)
        return
    # A target outside the vocabulary is never followed: it makes loss and gradient NaN.
    inside = (target >= 0) & (target < V)
    nan_outside = tl.where(inside, 0.0, float("nan"))
    # 32 bits: every column is compared with it.
    target = tl.where(inside, target, 0).to(tl.int32)

    if HAS_LSE:
        lse = tl.load(lse_ptr + row)
    else:
        z_target = tl.load(logits_row + target.to(tl.int64) * step).to(tl.float32)
        z_target = capped(z_target, softcap, HAS_SOFTCAP)
        maximum, sums = running_start(BLOCK)
        z_sums = tl.zeros((BLOCK,), dtype=tl.float32)
        ahead = _block(logits_row, 0, offs, step, V)
        for start in tl.range(0, V, BLOCK, num_stages=STAGES):
            mask = start + offs < V
            if STAGES == 2:
                z = ahead.to(tl.float32)
                ahead = _block(logits_row, start + BLOCK, offs, step, V)
            else:
                z = _block(logits_row, start, offs, step, V).to(tl.float32)
            if HAS_SOFTCAP:
                z = tl.where(mask, capped(z, softcap, True), float("-inf"))
            if HAS_SMOOTHING:
                z_sums += tl.where(mask, z, 0.0)
            maximum, sums = running_step(z * LOG2E, maximum, sums)
        lse = log2_sum(maximum, sums) / LOG2E
        loss = row_loss(lse, z_target, tl.sum(z_sums, axis=0), label_smoothing, z_loss, V)
        tl.store(loss_ptr + row, loss + nan_outside)
        tl.store(lse_ptr + row, lse)

    if grad_ptr is not None:
        scale = tl.load(scale_ptr + row) + nan_outside
        ahead = _block(logits_row, 0, offs, step, V)
        for start in tl.range(0, V, BLOCK, num_stages=STAGES):
            offs_v = start + offs
            mask = offs_v < V
            if STAGES == 2:
                z = ahead.to(tl.float32)
                ahead = _block(logits_row, start + BLOCK, offs, step, V)
            else:
                z = _block(logits_row, start, offs, step, V).to(tl.float32)
            z = capped(z, softcap, HAS_SOFTCAP)
            g = gradient(
                z, offs == target - start, lse, scale, label_smoothing, z_loss, softcap, V,
                HAS_SMOOTHING, HAS_SOFTCAP,
            )  # fmt: skip
            tl.store(grad_row + offs_v, g.to(grad_ptr.dtype.element_ty), mask=mask)
