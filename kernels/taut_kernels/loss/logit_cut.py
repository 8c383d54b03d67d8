"""How linear cross entropy cuts the logits, and what it runs on the pieces."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from taut_kernels.loss import row_chunks, row_softmax, vocabulary_chunks
from taut_kernels.loss.projection import Gradients, Projection, Wants
from taut_kernels.loss.reduction import accumulator
from taut_kernels.loss.row_softmax import Objective

CHUNK_BY = ("auto", "tokens", "vocabulary")
_LEAST_ROWS = 512
"""Fewer rows a chunk leave the products to the memory rate: see :mod:`._row_chunks`."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What runs between the products: kernels over whole rows, and over blocks of columns."""

    rows: row_softmax.Rows
    blocks: vocabulary_chunks.BlockKernels


TORCH = Kernels(row_softmax.cross_entropy_ref, vocabulary_chunks.TORCH)
TRITON = Kernels(row_softmax.launch, vocabulary_chunks.TRITON)


@dataclass(frozen=True, slots=True)
class Cut:
    """How the logits are cut.

    Attributes:
        by: ``tokens`` or ``vocabulary``.
        size: rows, or columns.
    """

    by: str
    size: int


def plan(
    M: int, V: int, itemsize: int, chunk_by: str, chunk_size: int, *, weight_wanted: bool
) -> Cut:
    """Choose how to cut the logits.

    Args:
        M: tokens.
        V: vocabulary.
        itemsize: bytes of a logit.
        chunk_by: one of `CHUNK_BY`.
        chunk_size: rows or columns, or 0 for what fits the workspace.
        weight_wanted: the weight has a gradient; without one ``tokens`` is always better.

    Returns:
        The cut.
    """
    rows = chunk_size or row_chunks.default_chunk(V, itemsize)
    if chunk_by == "auto":
        few = rows < min(_LEAST_ROWS, M) and not chunk_size
        chunk_by = "vocabulary" if few and weight_wanted else "tokens"
    if chunk_by == "tokens":
        return Cut("tokens", rows)
    columns = chunk_size or vocabulary_chunks.default_columns(M, itemsize)
    return Cut("vocabulary", columns)


def compute(
    kernels: Kernels,
    projection: Projection,
    target: Tensor,
    objective: Objective,
    cut: Cut,
    wants: Wants,
    fp32: bool,
    scale: Tensor | None,
    lse: Tensor | None,
) -> tuple[Tensor | None, Tensor, Gradients]:
    """Compute losses where no ``lse`` is given, and what gradients are wanted."""
    if cut.by == "vocabulary":
        walk = vocabulary_chunks.Walk(
            kernels.blocks, projection, target, objective, cut.size, wants
        )
        losses = None
        if lse is None:
            losses, lse = walk.losses(keep=any(wants))
        if not any(wants):
            return losses, lse, projection.empty_gradients(wants)
        assert scale is not None
        return losses, lse, walk.gradients(scale, lse)

    M, dtype = target.shape[0], accumulator(projection.x.dtype)
    losses = torch.empty(M, dtype=dtype, device=target.device)
    found = torch.empty_like(losses)

    def gradient_of(logits: Tensor, rows: slice) -> None:
        grad = logits if any(wants) else None
        factors = None if grad is None or scale is None else scale[rows]
        known = None if lse is None else lse[rows]
        losses[rows], found[rows] = kernels.rows(
            logits, target[rows], objective, factors, grad, known
        )

    gradients = row_chunks.run(projection, gradient_of, wants, cut.size, fp32=fp32)
    return losses, found, gradients
