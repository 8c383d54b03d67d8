"""Linear cross entropy a block of the vocabulary at a time: the least memory, whole products.

A first walk over the vocabulary gathers each row's statistics, a second one makes the gradients:
a block of the weight's gradient is one product over all rows, rounded once, and written once. The
logits of the first walk are kept for as many rows as the weight's gradient has columns: in its own
memory, block by block, until the second walk overwrites them with what they become. Only the rows
beyond are projected twice. So up to H rows cost three products and no memory but a block; M rows
cost 3 + (M − H) / M. The gradient of x is summed in fp32 over the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from taut_kernels.launch import launcher
from taut_kernels.loss import block_softmax
from taut_kernels.loss.block_softmax import Statistics
from taut_kernels.loss.projection import Gradients, Projection, Wants, add_product, column_sums
from taut_kernels.loss.reduction import accumulator
from taut_kernels.loss.row_softmax import Objective

BLOCK_BYTES = 56 * 2**20
"""Logits of a block. 8192 × 2304 × 256000 on an H200: blocks of 2048 columns 70.4 ms, 3584 (this)
64.2, 3712 65.5: the fewer waves of tiles a product has, the more its last one counts."""
_LEAST_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class BlockKernels:
    """What a walk runs on each block: the launchers, or the references."""

    statistics: Callable[..., None]
    gradient: Callable[..., None]


TORCH = BlockKernels(block_softmax.statistics_ref, block_softmax.gradient_ref)
TRITON = BlockKernels(block_softmax.launch_statistics, block_softmax.launch_gradient)


def default_columns(M: int, itemsize: int) -> int:
    """Return how many columns a block has, in whole tiles of a product.

    Args:
        M: rows.
        itemsize: bytes of a logit.
    """
    columns = BLOCK_BYTES // max(1, M * itemsize) // 256 * 256
    return min(block_softmax.MOST_COLUMNS, max(_LEAST_COLUMNS, columns))


class Walk:
    """The two walks over one batch.

    Args:
        kernels: what runs on each block.
        projection: of the logits.
        target: [M] int64.
        objective: options.
        columns: of a block.
        wants: gradients the second walk is to make.
    """

    def __init__(
        self,
        kernels: BlockKernels,
        projection: Projection,
        target: Tensor,
        objective: Objective,
        columns: int,
        wants: Wants,
    ) -> None:
        self._kernels, self._projection = kernels, projection
        self._target, self._objective, self._wants = target, objective, wants
        x = projection.x
        (self._M, self._H), self._V = x.shape, projection.weight.shape[0]
        self._columns = min(columns, self._V)
        self._scratch = launcher.empty((self._M * self._columns,), dtype=x.dtype, device=x.device)
        self._gradients = projection.empty_gradients(wants._replace(x=False))
        self._kept = 0

    def _blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield each block's columns, scratch [M, columns], and memory of its kept logits."""
        for start in range(0, self._V, self._columns):
            stop = min(start + self._columns, self._V)
            scratch = self._scratch[: self._M * (stop - start)].view(self._M, stop - start)
            kept = scratch[:0]
            if self._kept:
                flat = self._gradients.weight.view(-1)[start * self._H :]
                kept = flat[: self._kept * (stop - start)].view(self._kept, stop - start)
            yield slice(start, stop), scratch, kept

    def losses(self, *, keep: bool) -> tuple[Tensor, Tensor]:
        """Walk once for the rows' losses and lse.

        Args:
            keep: leave logits behind for :meth:`gradients`.

        Returns:
            Losses and lse, [M] each.
        """
        x = self._projection.x
        self._kept = min(self._M, self._H) if keep and self._wants.weight else 0
        known = Statistics(self._M, accumulator(x.dtype), x.device)
        for columns, scratch, kept in self._blocks():
            for rows, logits in self._parts(scratch, kept):
                self._projection.logits(logits, rows, columns)
                arguments = (self._target[rows], known.values[:, rows], columns.start)
                self._kernels.statistics(logits, *arguments, self._objective)
        return known.finish(self._target, self._objective, self._V)

    def _parts(self, scratch: Tensor, kept: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows and logits: those that are kept, then those that are not."""
        split = kept.shape[0]
        if split:
            yield slice(0, split), kept
        if split < self._M:
            yield slice(split, self._M), scratch[split:]

    def gradients(self, scale: Tensor, lse: Tensor) -> Gradients:
        """Walk for the gradients.

        Args:
            scale: [M] factors of the rows.
            lse: [M] of :meth:`losses`.

        Returns:
            The gradients that are wanted.
        """
        total = self._walk_gradients(scale, lse)
        del self._scratch  # before the rounded copy of the sum is made
        return Gradients(total.to(self._projection.x.dtype), *self._gradients[1:])

    def _walk_gradients(self, scale: Tensor, lse: Tensor) -> Tensor:
        """Fill the gradients of weight and bias; return the sum for x."""
        x, weight = self._projection.x, self._projection.weight
        _, grad_weight, grad_bias = self._gradients
        shape = tuple(x.shape) if self._wants.x else (0,)
        total = launcher.empty(shape, dtype=accumulator(x.dtype), device=x.device)
        for columns, scratch, kept in self._blocks():
            for rows, logits in self._parts(scratch, kept):
                if rows.start == kept.shape[0]:
                    self._projection.logits(logits, rows, columns)
                factors = (self._target[rows], scale[rows], lse[rows], columns.start)
                self._kernels.gradient(logits, scratch[rows], *factors, self._V, self._objective)
            if self._wants.weight:
                # Over the kept logits, whose gradient is in the scratch by now.
                torch.mm(scratch.t(), x, out=grad_weight[columns])
            if self._wants.x:
                add_product(total, scratch, weight[columns], columns.start == 0)
            if self._wants.bias:
                grad_bias[columns] = column_sums(scratch)
        return total
