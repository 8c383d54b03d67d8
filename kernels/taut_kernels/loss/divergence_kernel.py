"""Jit function of the distillation losses: the divergence of two rows of logits."""

# ruff: noqa: C901 (a kernel is one function: its branches fall at compile time)
# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from taut_kernels.loss.softmax_jit import log2_sum, running_start, running_step, store_zeros


@triton.jit
def _log2_probabilities(row_ptr, offs_v, mask, to_log2, lse2):
    """Load logits and return log2 of their softmax; −inf where there is none."""
    z = tl.load(row_ptr + offs_v, mask=mask, other=float("-inf")).to(tl.float32)
    return z * to_log2 - lse2


@triton.jit
def _times_log_ratio(p, log2_p, log2_q):
    """Return p · (log2 p − log2 q), which is 0 where p is."""
    return tl.where(p > 0.0, p * (log2_p - log2_q), 0.0)


@triton.jit
def _log2_mixture(p, q, beta):
    return tl.log2(beta * q + (1.0 - beta) * p)


@triton.jit(do_not_specialize=["M"])
def divergence_kernel(
    student_ptr,  # [M, V] logits
    teacher_ptr,  # [M, V] logits
    scale_ptr,  # [M] fp32 factors of the rows' gradients (0: the row does not count), or None
    keep_ptr,  # [M] int8: 0 for rows that do not count
    loss_ptr,  # [M] fp32, written
    grad_ptr,  # [M, V], may be student; or None
    M,
    stride_sm,
    stride_tm,
    stride_gm,
    temperature,
    beta,
    V: tl.constexpr,
    FORM: tl.constexpr,  # forward_kl, reverse_kl or jsd
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row a program, in passes that read both rows, from L2 after the first.

    Both log-sum-exps; then the row's sums, where the form needs them for its gradient; then that.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0)
    student_row = student_ptr + row.to(tl.int64) * stride_sm
    teacher_row = teacher_ptr + row.to(tl.int64) * stride_tm
    grad_row = grad_ptr
    if grad_ptr is not None:
        grad_row = grad_ptr + row.to(tl.int64) * stride_gm
    offs = tl.arange(0, BLOCK)
    if tl.load(keep_ptr + row) == 0:
        tl.store(loss_ptr + row, 0.0)
        if grad_ptr is not None:
            store_zeros(grad_row, offs, V, BLOCK)
        return

    to_log2 = LOG2E / temperature
    student_max, student_sums = running_start(BLOCK)
    teacher_max, teacher_sums = running_start(BLOCK)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        mask = start + offs < V
        z = tl.load(student_row + start + offs, mask=mask, other=float("-inf")).to(tl.float32)
        t = tl.load(teacher_row + start + offs, mask=mask, other=float("-inf")).to(tl.float32)
        student_max, student_sums = running_step(z * to_log2, student_max, student_sums)
        teacher_max, teacher_sums = running_step(t * to_log2, teacher_max, teacher_sums)
    student_lse = log2_sum(student_max, student_sums)
    teacher_lse = log2_sum(teacher_max, teacher_sums)

    # Σ p · log2(p / q), or the two of the Jensen-Shannon divergence; forward KL meets its own on
    # the way through the gradient.
    student_part = tl.zeros((BLOCK,), dtype=tl.float32)
    teacher_part = tl.zeros((BLOCK,), dtype=tl.float32)
    if FORM != "forward_kl" or grad_ptr is None:
        for start in tl.range(0, V, BLOCK, num_stages=STAGES):
            offs_v = start + offs
            log2_p = _log2_probabilities(student_row, offs_v, offs_v < V, to_log2, student_lse)
            log2_q = _log2_probabilities(teacher_row, offs_v, offs_v < V, to_log2, teacher_lse)
            p = tl.exp2(log2_p)
            q = tl.exp2(log2_q)
            if FORM == "forward_kl":
                teacher_part += _times_log_ratio(q, log2_q, log2_p)
            elif FORM == "reverse_kl":
                student_part += _times_log_ratio(p, log2_p, log2_q)
            else:
                log2_m = _log2_mixture(p, q, beta)
                student_part += _times_log_ratio(p, log2_p, log2_m)
                teacher_part += _times_log_ratio(q, log2_q, log2_m)
    student_sum = tl.sum(student_part, axis=0)

    # ∂/∂z of temperature² · divergence is temperature · (…)
    if grad_ptr is not None:
        scale = tl.load(scale_ptr + row) * temperature
        for start in tl.range(0, V, BLOCK, num_stages=STAGES):
            offs_v = start + offs
            mask = offs_v < V
            log2_p = _log2_probabilities(student_row, offs_v, mask, to_log2, student_lse)
            log2_q = _log2_probabilities(teacher_row, offs_v, mask, to_log2, teacher_lse)
            p = tl.exp2(log2_p)
            q = tl.exp2(log2_q)
            if FORM == "forward_kl":
                teacher_part += _times_log_ratio(q, log2_q, log2_p)
                g = p - q
            elif FORM == "reverse_kl":
                g = (_times_log_ratio(p, log2_p, log2_q) - p * student_sum) / LOG2E
            else:
                log2_m = _log2_mixture(p, q, beta)
                g = _times_log_ratio(p, log2_p, log2_m) - p * student_sum
                g = g * ((1.0 - beta) / LOG2E)
            tl.store(grad_row + offs_v, (g * scale).to(grad_ptr.dtype.element_ty), mask=mask)
    teacher_sum = tl.sum(teacher_part, axis=0)
    if FORM == "forward_kl":
        loss = teacher_sum
    elif FORM == "reverse_kl":
        loss = student_sum
    else:
        loss = beta * teacher_sum + (1.0 - beta) * student_sum
    tl.store(loss_ptr + row, loss * (temperature * temperature / LOG2E))
