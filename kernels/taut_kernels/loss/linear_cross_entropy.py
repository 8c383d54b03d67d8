"""Cross entropy of a projection's outputs: the [tokens, vocabulary] logits never exist as a whole.

Maths     z = x · Wᵀ + b, then :mod:`.cross_entropy`
Ops       `taut::linear_cross_entropy` → loss, lse, gradients or nothing;
          `taut::linear_cross_entropy_backward` → gradients, all from the beginning
Shapes    x [..., H] bf16|fp16|fp32   weight [V, H] and bias [V] as x   target [...] integers
          → loss fp32, [...] for reduction ``none``, else a scalar
Method    two ways to cut the logits, products by torch (cuBLAS) in both:
          ``tokens``: `chunk_size` rows of logits, which become their gradient in place
          (:mod:`._row_chunks`; 3 products, the weight's gradient is summed over the chunks);
          ``vocabulary``: blocks of columns (:mod:`._vocabulary_chunks`; 3 products up to H rows,
          3 + (M − H) / M beyond, the weight's gradient rounded once, almost no memory).
          ``auto`` takes ``tokens`` where its workspace holds 512 rows or the whole batch
Floors    6 · M · H · V operations at the card's bf16 rate. One H200 (707 TFLOP/s, 4.24 TB/s):
          8192 × 2304 × 256000 41.0 ms, 8192 × 4096 × 128256 36.5 ms; the bytes of weight, its
          gradient and the logits once each way 2.5 and 1.5 ms. Measured:
          docs/findings/linear-cross-entropy.md
Numerics  under autocast the operands are cast to its dtype, as those of a linear layer are; logits
          rounded to x's dtype, likewise; losses in fp32; gradients of logits
          rounded to x's dtype. ``tokens`` sums the weight's gradient in its dtype or in fp32
Gradient  as for cross entropy: in the forward pass for ``mean`` and ``sum`` (not fp16), where the
          weight's and x's gradients then wait for the backward pass; else, and with
          use_checkpoint, in the backward pass, which projects once more and can be run again
CPU       the same walks in plain torch, also fp64
Limits    differentiable once; else as for cross entropy
Source    chunks of rows with gradients in the forward pass: Liger Kernel, arXiv:2410.10989, §3.2;
          blocks of the vocabulary: Cut Cross-Entropy, arXiv:2411.09009, §4. Logits kept in the
          gradient's memory, and the code: ours.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from taut_kernels.launch.op_registration import register_op
from taut_kernels.loss import gradient_scale
from taut_kernels.loss.block_softmax import MOST_COLUMNS
from taut_kernels.loss.logit_cut import CHUNK_BY, TORCH, TRITON, Kernels, compute, plan
from taut_kernels.loss.projection import (
    Projection,
    Wants,
    autocast_operands,
    check_chunk,
    check_projection,
)
from taut_kernels.loss.reduction import (
    accumulator,
    check_options,
    loss_shape,
    reduce,
    refuse_double_backward,
    row_scale,
    wanted_gradients,
)
from taut_kernels.loss.row_softmax import Objective
from taut_kernels.loss.target import check_labels, check_values


class _Call(NamedTuple):
    """Operands and options of the ops, in the order of their schemas."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    reduction: str
    chunk_by: str
    chunk_size: int
    accumulate_fp32: bool

    def run(self, kernels: Kernels, wants: list[bool], scale: Tensor, lse: Tensor | None) -> Any:
        """Compute losses, lse and gradients; with ``lse`` from before no losses."""
        wanted = Wants(*wants)
        sizes = len(self.x), len(self.weight), self.x.itemsize
        return compute(
            kernels,
            Projection(self.x, self.weight, self.bias),
            self.target,
            Objective(self.ignore_index, self.label_smoothing, self.z_loss, self.softcap),
            plan(*sizes, self.chunk_by, self.chunk_size, weight_wanted=wanted.weight),
            wanted,
            self.accumulate_fp32,
            scale,
            lse,
        )


def _linear_cross_entropy(kernels: Kernels, *given: Any) -> tuple[Tensor, ...]:
    call, check, wants = _Call(*given[:-2]), *given[-2:]
    if check or not call.target.is_cuda:
        check_values(call.target, len(call.weight), call.ignore_index)
    counts = call.target != call.ignore_index
    scale = row_scale(counts, call.reduction, accumulator(call.x.dtype))
    losses, lse, gradients = call.run(kernels, wants, scale, None)
    return reduce(losses, counts, call.reduction), lse, *gradients


def _linear_cross_entropy_backward(
    kernels: Kernels, grad_loss: Tensor, lse: Tensor, *given: Any
) -> tuple[Tensor, ...]:
    call = _Call(*given[:-1])
    scale = row_scale(call.target != call.ignore_index, call.reduction, lse.dtype)
    scale = scale * grad_loss.to(lse.dtype)
    _, _, gradients = call.run(kernels, given[-1], scale.contiguous(), lse)
    return tuple(gradients)


_OPERANDS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor target, int ignore_index, "
    "float label_smoothing, float z_loss, float softcap, str reduction, str chunk_by, "
    "int chunk_size, bool accumulate_fp32"
)


def fake_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, wants: list[bool]
) -> tuple[Tensor, ...]:
    """Return gradients as :meth:`Projection.empty_gradients` would, for shape inference."""
    V = weight.shape[0]
    return (
        x.new_empty(tuple(x.shape) if wants[0] else (0,)),
        weight.new_empty(tuple(weight.shape) if wants[1] else (0,)),
        (weight if bias is None else bias).new_empty((V,) if wants[2] else (0,)),
    )


def _fake_linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    dtype = accumulator(x.dtype)
    loss = x.new_empty(loss_shape(target.shape[0], options[4]), dtype=dtype)
    lse = x.new_empty((target.shape[0],), dtype=dtype)
    return loss, lse, *fake_gradients(x, weight, bias, options[-1])


def _fake_linear_cross_entropy_backward(
    grad_loss: Tensor, lse: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    return fake_gradients(x, weight, bias, options[-1])


for _schema, _implementation, _fake in (
    (
        f"taut::linear_cross_entropy({_OPERANDS}, bool check, bool[] wants) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor)",
        _linear_cross_entropy,
        _fake_linear_cross_entropy,
    ),
    (
        f"taut::linear_cross_entropy_backward(Tensor grad_loss, Tensor lse, {_OPERANDS}, "
        "bool[] wants) -> (Tensor, Tensor, Tensor)",
        _linear_cross_entropy_backward,
        _fake_linear_cross_entropy_backward,
    ),
):
    register_op(_schema, partial(_implementation, TORCH), partial(_implementation, TRITON), _fake)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, target, *options, _, wants = inputs
    _, lse, *gradients = output
    ctx.mark_non_differentiable(lse, *gradients)
    ctx.set_materialize_grads(False)
    ctx.options, ctx.in_forward = tuple(options), any(wants)
    saved = gradients if ctx.in_forward else (lse, x, weight, bias, target)
    ctx.save_for_backward(*saved)


def _autograd(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    refuse_double_backward("linear_cross_entropy")
    return gradient_scale.of_projection(ctx, grad_loss, "linear_cross_entropy")


torch.library.register_autograd(
    "taut::linear_cross_entropy", _autograd, setup_context=_setup_context
)


def _check_cut(chunk_by: str, chunk_size: int | None) -> None:
    if chunk_by not in CHUNK_BY:
        raise ValueError(f"chunk_by must be auto, tokens or vocabulary, got {chunk_by!r}")
    check_chunk(chunk_size, MOST_COLUMNS if chunk_by == "vocabulary" else None)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    chunk_size: int | None = None,
    chunk_by: str = "auto",
    accumulate_fp32: bool = False,
    use_checkpoint: bool = False,
    check_targets: bool = False,
) -> Tensor:
    """Project and compute the cross entropy, without the logits of more than a chunk.

    Args:
        x: [..., H] bf16, fp16, fp32, or fp64 on the CPU.
        weight: [V, H], dtype of ``x``.
        target: [...] int64 or int32 class indices.
        bias: [V], dtype of ``x``, or None.
        ignore_index: target of rows that do not count.
        label_smoothing: ε of the uniform distribution mixed in, 0..1.
        z_loss: λ of λ · lse², which keeps the normaliser near 1.
        softcap: c of c · tanh(z / c), applied to the logits; None for none.
        reduction: ``mean`` over the rows that count, ``sum`` or ``none``.
        chunk_size: tokens, or columns (at most 8192), whose logits exist at a time; None: 192 MiB
            of tokens, or 56 MiB of columns.
        chunk_by: ``tokens``, ``vocabulary`` or ``auto``; ``auto`` with a chunk_size is ``tokens``.
        accumulate_fp32: sum the weight's gradient over chunks of tokens in fp32: twice its memory.
        use_checkpoint: keep no gradients for the backward pass, which projects once more.
        check_targets: raise for a target outside the vocabulary on CUDA too, which waits for the
            device; without it such a target makes loss and gradients NaN.

    Returns:
        The loss in fp32 (fp64 for fp64): a scalar, or [...] for ``none``.

    Raises:
        ValueError: a shape, dtype, device, option or target the contract does not allow; names it.
        RuntimeError: a second derivative, or a second backward pass over kept gradients.
    """
    check_options(reduction, label_smoothing, z_loss, softcap)
    _check_cut(chunk_by, chunk_size)
    x, weight, bias = autocast_operands(x, weight, bias)
    check_projection(x, weight, bias)
    check_labels(target, x.shape[:-1], x.device)
    wants = wanted_gradients((x, weight, bias), reduction, use_checkpoint)
    loss: Tensor = torch.ops.taut.linear_cross_entropy(
        x.reshape(-1, x.shape[-1]), weight, bias, target.reshape(-1).to(torch.int64).contiguous(),
        ignore_index, label_smoothing, z_loss, softcap or 0.0, reduction, chunk_by,
        chunk_size or 0, accumulate_fp32, check_targets, wants,
    )[0]  # fmt: skip
    return loss.view(target.shape) if reduction == "none" else loss
