"""Jit functions the loss kernels share: soft cap, and the running softmax over a long row.

Everything is in powers of two: ``e^z = 2^(z · log2 e)``, so that an exponential is one fused
multiply-add and one instruction.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def capped(z, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return softcap · tanh(z / softcap), or z; the exponential may overflow, which gives 1."""
    if HAS_SOFTCAP:
        z = softcap * (1.0 - 2.0 / (1.0 + tl.exp(z * (2.0 / softcap))))
    return z


@triton.jit
def running_step(z2, maximum, sums):
    """Take one block into the running softmax of a row.

    Args:
        z2: [BLOCK] logits · log2 e, −inf where there is none.
        maximum: scalar, largest so far.
        sums: [BLOCK], each lane's Σ 2^(z2 − maximum): one reduction over the row, at its end.
    """
    raised = tl.maximum(maximum, tl.max(z2, axis=0))
    # A row that starts with -inf alone: -inf - -inf would be NaN.
    shift = tl.where(raised == float("-inf"), 0.0, raised)
    sums = sums * tl.exp2(maximum - shift) + tl.exp2(z2 - shift)
    return raised, sums


@triton.jit
def log2_sum(maximum, sums):
    """Return log2 Σ 2^z2 of a row from what :func:`running_step` left."""
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    return shift + tl.log2(tl.sum(sums, axis=0))
