"""Kullback-Leibler divergence of a student's projection from a teacher's, for distillation.

Maths     p = softmax((x · Wᵀ + b) / T), q = softmax of the teacher's, likewise
          loss = T² · Σ q · log(q / p), or reversed T² · Σ p · log(p / q), of each row
Ops       `taut::linear_divergence` → loss, gradients or nothing; `…_backward` → gradients
Shapes    x [..., H], weight [V, H], bias [V] bf16|fp16|fp32 of one dtype; teacher_x [..., Ht],
          teacher_weight [V, Ht], teacher_bias [V] of one dtype; mask [...] bool
          → loss fp32, [...] for reduction ``none``, else a scalar
Method    a chunk of rows at a time, four products by torch (cuBLAS) and one kernel between
Floors    (6 · H + 2 · Ht) · M · V operations: 48.7 ms at 8192 tokens, H = Ht = 4096, V = 128256 and
          707 TFLOP/s (one H200), 6.1 ms at 1024
Numerics  logits rounded to their dtype, as a linear layer would; fp32 from there to the gradient of
          the logits, rounded to x's dtype. A mean over no row is 0
Gradient  of the student alone; in the forward pass or the backward pass as for
          :mod:`.linear_cross_entropy`
CPU       the same in plain torch, also fp64
Limits    differentiable once; both vocabularies have one order and size
Source    Hinton et al., arXiv:1503.02531, §2 (temperature, T²); reversed: MiniLLM,
          arXiv:2306.08543, §2.1. The code is ours.
"""

from __future__ import annotations

from torch import Tensor

from taut_kernels.loss.divergence import Divergence
from taut_kernels.loss.linear_divergence import linear_divergence


def linear_kl(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    reverse: bool = False,
    reduction: str = "mean",
    chunk_size: int | None = None,
    accumulate_fp32: bool = False,
    use_checkpoint: bool = False,
) -> Tensor:
    """Project both and compute their divergence, without the logits of more than a chunk.

    Under autocast the operands are cast to its dtype, as those of a linear layer are.

    Args:
        x: [..., H] the student's hidden states, bf16, fp16, fp32, or fp64 on the CPU.
        weight: [V, H], dtype of ``x``.
        teacher_x: [..., Ht], detached.
        teacher_weight: [V, Ht], dtype of ``teacher_x``, detached.
        bias: [V], dtype of ``x``, or None.
        teacher_bias: [V], dtype of ``teacher_x``, detached, or None.
        mask: [...] bool, the tokens that count; None for all.
        temperature: T; the loss is multiplied by T².
        reverse: the divergence of the teacher from the student, Σ p · log(p / q).
        reduction: ``mean`` over the tokens that count, ``sum`` or ``none``.
        chunk_size: tokens whose logits exist at a time; None: what fits 512 MiB.
        accumulate_fp32: sum the weight's gradient in fp32, which takes twice its memory.
        use_checkpoint: keep no gradient between forward and backward: the backward pass projects
            once more.

    Returns:
        The loss in fp32 (fp64 for fp64): a scalar, or [...] for ``none``.

    Raises:
        ValueError: a shape, dtype, device or option the contract does not allow; names it.
        RuntimeError: in the backward pass: it is to be differentiated itself, or runs a second
            time over gradients computed in the forward pass.
    """
    return linear_divergence(
        Divergence("reverse_kl" if reverse else "forward_kl", temperature, 0.0),
        (x, weight, bias),
        (teacher_x, teacher_weight, teacher_bias),
        mask,
        reduction=reduction,
        chunk_size=chunk_size,
        accumulate_fp32=accumulate_fp32,
        use_checkpoint=use_checkpoint,
    )
