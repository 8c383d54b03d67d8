"""Generalised Jensen-Shannon divergence of a student's and a teacher's projections.

Maths     p = softmax((x · Wᵀ + b) / T), q = softmax of the teacher's, m = β · q + (1 − β) · p
          loss = T² · (β · Σ q · log(q / m) + (1 − β) · Σ p · log(p / m)) of each row;
          β = 0 is Σ q · log(q / p) and β = 1 is Σ p · log(p / q), the limits of loss / β and of
          loss / (1 − β)
Ops, shapes, method, numerics, gradient, limits    as :mod:`.linear_kl`
Source    GKD, arXiv:2306.13649, eq. 1; T² as for KL. The code is ours.
"""

from __future__ import annotations

from torch import Tensor

from taut_kernels.loss.divergence import Divergence
from taut_kernels.loss.linear_divergence import linear_divergence

_LIMITS = {0.0: "forward_kl", 1.0: "reverse_kl"}


def linear_jsd(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    mask: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "mean",
    chunk_size: int | None = None,
    accumulate_fp32: bool = False,
    use_checkpoint: bool = False,
) -> Tensor:
    """Project both and compute their divergence, without the logits of more than a chunk.

    Args:
        x: [..., H] the student's hidden states, bf16, fp16, fp32, or fp64 on the CPU.
        weight: [V, H], dtype of ``x``.
        teacher_x: [..., Ht], detached.
        teacher_weight: [V, Ht], dtype of ``teacher_x``, detached.
        bias: [V], dtype of ``x``, or None.
        teacher_bias: [V], dtype of ``teacher_x``, detached, or None.
        mask: [...] bool, the tokens that count; None for all.
        beta: the teacher's share of the mixture, 0..1; at its ends the two KL divergences.
        temperature: T; the loss is multiplied by T².
        reduction: ``mean`` over the tokens that count, ``sum`` or ``none``.
        chunk_size: as for :func:`.linear_kl.linear_kl`.
        accumulate_fp32: likewise.
        use_checkpoint: likewise.

    Returns:
        The loss in fp32 (fp64 for fp64): a scalar, or [...] for ``none``.

    Raises:
        ValueError: a shape, dtype, device or option the contract does not allow; names it.
        RuntimeError: in the backward pass: it is to be differentiated itself, or runs a second
            time over gradients computed in the forward pass.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta must lie in 0..1, got {beta}")
    return linear_divergence(
        Divergence(_LIMITS.get(beta, "jsd"), temperature, beta),
        (x, weight, bias),
        (teacher_x, teacher_weight, teacher_bias),
        mask,
        reduction=reduction,
        chunk_size=chunk_size,
        accumulate_fp32=accumulate_fp32,
        use_checkpoint=use_checkpoint,
    )
