"""Jit functions the loss kernels share: soft cap, and the running softmax over a long row.

Everything is in powers of two: ``e^z = 2^(z · log2 e)``, so that an exponential is one fused
multiply-add and one instruction.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_zeros(grad_row, offs, V: tl.constexpr, BLOCK: tl.constexpr):
    """Make the gradient of a row 0."""
    zeros = tl.zeros((BLOCK,), dtype=grad_row.dtype.element_ty)
    for start in tl.range(0, V, BLOCK):
        tl.store(grad_row + start + offs, zeros, mask=start + offs < V)


@triton.jit
def capped(z, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return softcap · tanh(z / softcap), or z; the exponential may overflow, which gives 1."""
    if HAS_SOFTCAP:
        z = softcap * (1.0 - 2.0 / (1.0 + tl.exp(z * (2.0 / softcap))))
    return z


@triton.constexpr_function
def lanes_of(block: int) -> int:
    """Return how many running softmaxes share a block: each takes 8 columns, or all of fewer."""
    return block // 8 if block > 8 else 1


@triton.jit
def running_start(BLOCK: tl.constexpr):
    """Return the state before the first block: [lanes] maxima and sums."""
    LANES: tl.constexpr = lanes_of(BLOCK)
    return tl.full((LANES,), float("-inf"), tl.float32), tl.zeros((LANES,), dtype=tl.float32)


@triton.jit
def running_step(z2, maximum, sums):
    """Take one block into the running softmaxes of a row.

    A lane is 8 neighbouring columns, which one thread loads: no step waits for another thread, and
    an element takes 9/8 exponentials.

    Args:
        z2: [BLOCK] logits · log2 e, −inf where there is none.
        maximum: [lanes] largest so far.
        sums: [lanes] Σ 2^(z2 − maximum).
    """
    LANES: tl.constexpr = maximum.shape[0]
    z2 = tl.reshape(z2, (LANES, z2.shape[0] // LANES))
    raised = tl.maximum(maximum, tl.max(z2, axis=1))
    # A lane that starts with -inf alone: -inf - -inf would be NaN.
    shift = tl.where(raised == float("-inf"), 0.0, raised)
    sums = sums * tl.exp2(maximum - shift) + tl.sum(tl.exp2(z2 - shift[:, None]), axis=1)
    return raised, sums


@triton.jit
def log2_sum(maximum, sums):
    """Return log2 Σ 2^z2 of a row from what :func:`running_step` left."""
    raised = tl.max(maximum, axis=0)
    shift = tl.where(raised == float("-inf"), 0.0, raised)
    return shift + tl.log2(tl.sum(sums * tl.exp2(maximum - shift), axis=0))
