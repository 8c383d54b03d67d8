"""Linear losses a chunk of rows at a time: [chunk, vocabulary] logits exist, no more.

A chunk's logits become their own gradient in place and meet both operands once: three products a
chunk where a gradient is wanted for both. The weight's gradient is read and written by each chunk:
below 2 · (operations a second) / (bytes a second) ≈ 345 rows of bf16 on an H200 that costs more
than the product itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from taut_kernels.launch import launcher
from taut_kernels.loss.projection import Gradients, Projection, Wants, add_product, column_sums

WORKSPACE_BYTES = 192 * 2**20
"""Logits a chunk may have. With the gradients of 8192 × 4096 × 128256 (1.04 GiB) that makes
1.23 GiB. Measured there on an H200: 512 rows 45.1 ms, 640 44.6, 768 (this) 42.9, 1024 41.9."""
_ROW_MULTIPLE = 128


def default_chunk(V: int, itemsize: int) -> int:
    """Return how many rows of logits fit the workspace, in whole tiles of a product.

    Args:
        V: vocabulary.
        itemsize: bytes of a logit.
    """
    rows = WORKSPACE_BYTES // (V * itemsize)
    return max(_ROW_MULTIPLE, rows // _ROW_MULTIPLE * _ROW_MULTIPLE)


class GradientSums:
    """Collects the gradients of a projection over chunks of rows.

    Args:
        projection: whose.
        wants: which.
        fp32: keep the weight's sum in fp32 until the last chunk.
    """

    def __init__(self, projection: Projection, wants: Wants, *, fp32: bool) -> None:
        self._projection, self._wants = projection, wants
        weight = projection.weight
        wide = wants.weight and fp32 and weight.dtype.itemsize < 4
        self._gradients = projection.empty_gradients(
            wants._replace(weight=wants.weight and not wide)
        )
        self._weight = self._gradients.weight
        if wide:
            shape = tuple(weight.shape)
            self._weight = launcher.empty(shape, dtype=torch.float32, device=weight.device)
        self._bias: Tensor | None = None
        self._first = True

    def add(self, dlogits: Tensor, rows: slice) -> None:
        """Take the gradient of some rows' logits.

        Args:
            dlogits: [rows, V].
            rows: which.
        """
        projection = self._projection
        if self._wants.x:
            torch.mm(dlogits, projection.weight, out=self._gradients.x[rows])
        if self._wants.weight:
            add_product(self._weight, dlogits.t(), projection.x[rows], self._first)
        if self._wants.bias:
            sums = column_sums(dlogits)
            self._bias = sums if self._bias is None else self._bias.add_(sums)
        self._first = False

    def total(self) -> Gradients:
        """Return the gradients in the dtypes of their operands."""
        weight, bias = self._weight, self._gradients.bias
        if self._first:
            weight.zero_()
            bias.zero_()
        if self._bias is not None:
            bias.copy_(self._bias)
        return Gradients(self._gradients.x, weight.to(self._projection.weight.dtype), bias)


def chunks(M: int, chunk: int) -> Iterator[slice]:
    """Yield the rows of each chunk."""
    for start in range(0, M, chunk):
        yield slice(start, min(start + chunk, M))


def run(
    projection: Projection,
    gradient_of: Callable[[Tensor, slice], None],
    wants: Wants,
    chunk: int,
    *,
    fp32: bool,
) -> Gradients:
    """Make each chunk's logits, hand them over, and collect the gradients they become.

    Args:
        projection: of the logits that are differentiated.
        gradient_of: takes a chunk's logits and rows, computes their losses, and turns the logits
            into their gradient where any is wanted.
        wants: which gradients.
        chunk: rows of logits at a time.
        fp32: sum the weight's gradient in fp32.

    Returns:
        The gradients.
    """
    sums = GradientSums(projection, wants, fp32=fp32)
    _walk(projection, gradient_of, sums if any(wants) else None, chunk)
    return sums.total()


def _walk(
    projection: Projection,
    gradient_of: Callable[[Tensor, slice], None],
    sums: GradientSums | None,
    chunk: int,
) -> None:
    """Go over the chunks; the logits' memory is free again when this returns."""
    x, V = projection.x, projection.weight.shape[0]
    M = x.shape[0]
    buffer = launcher.empty((min(chunk, M), V), dtype=x.dtype, device=x.device)
    for rows in chunks(M, chunk):
        logits = projection.logits(buffer[: rows.stop - rows.start], rows)
        gradient_of(logits, rows)
        if sums is not None:
            sums.add(logits, rows)
