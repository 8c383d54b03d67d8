"""GPTQ: round one input channel at a time and push its error onto the channels not yet rounded.

Source: GPTQ, arXiv:2210.17323, §3 (Cholesky form, lazy blocks). Two choices on top of the paper:
the grid of every group is fixed beforehand from the original weights with the Hessian's diagonal as
importance, and columns may be visited in order of importance while groups stay where they are
("static" act-order), so the stored layout is plain and needs no index.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch

from taut_deploy.compress.quantize.protocol import Codes, ColumnRounding, Spec

C = TypeVar("C", bound=Codes)

_LAZY_BLOCK = 128
_MAX_DAMPENING = 1.0


@dataclass(frozen=True)
class Feedback:
    """How an error is pushed onto channels not yet rounded: the same for all layers of an input.

    Args:
        importance: [K] the Hessian's diagonal, 1 where a channel is never active.
        dead: [K] bool, channels that are never active.
        order: [K] int64, the order in which channels are visited.
        factor: [K, K] from :func:`inverse_cholesky`, in that order.
    """

    importance: torch.Tensor
    dead: torch.Tensor
    order: torch.Tensor
    factor: torch.Tensor


def feedback_of(
    hessian: torch.Tensor, *, dampening_frac: float = 0.01, act_order: bool = True
) -> Feedback:
    """Prepare an input for :func:`quantize_weight`.

    Args:
        hessian: [K, K] fp32, mean of ``x xᵀ`` over calibration tokens.
        dampening_frac: share of the mean diagonal added to the diagonal; grows tenfold while the
            matrix is not positive definite.
        act_order: visit columns by falling diagonal.

    Raises:
        ValueError: the Hessian is not finite, or not positive definite at any dampening tried.
    """
    dead = hessian.diagonal() == 0
    importance = hessian.diagonal().clone()
    importance[dead] = 1.0
    order = (
        importance.argsort(descending=True, stable=True)
        if act_order
        else torch.arange(len(importance), device=hessian.device)
    )
    factor = inverse_cholesky(hessian, importance, order, dampening_frac)
    return Feedback(importance, dead, order, factor)


def quantize_weight(
    weight: torch.Tensor,
    feedback: Feedback,
    spec: Spec[C],
    *,
    mask: torch.Tensor | None = None,
) -> C:
    """Quantise one linear layer's weight against its input statistics.

    Args:
        weight: [N, K] fp32.
        feedback: of its input, from :func:`feedback_of`.
        spec: the grid's shape, of any element type.
        mask: [N, K] bool, False where a weight was pruned: it stays zero, and what it would have
            become is pushed onto the channels not yet rounded.

    Returns:
        Codes with scales and zero points, in the original column order.
    """
    weight = torch.where(feedback.dead, torch.zeros_like(weight), weight)
    grid = spec.fit(weight, feedback.importance)
    order = feedback.order
    # Input channels are rows from here on, so that one visited channel is contiguous memory.
    kept = None if mask is None else mask.T[order].contiguous()
    visited = weight.T[order].contiguous()
    del weight  # one of several matrices as large as the layer in fp32
    _round_with_feedback(visited, feedback.factor, grid.by_column(order), kept)
    rounded = torch.empty(visited.shape[1], visited.shape[0], device=visited.device)
    rounded[:, order] = visited.T
    del visited
    return grid.encode(rounded)


def inverse_cholesky(
    hessian: torch.Tensor, diagonal: torch.Tensor, order: torch.Tensor, dampening_frac: float
) -> torch.Tensor:
    """Upper Cholesky factor of the dampened Hessian's inverse, [K, K], channels in their order.

    On a CPU one matrix is held beside the Hessian, on a card two: one of a wide layer is as large
    as a block.

    Args:
        hessian: [K, K] fp32; stays as it is.
        diagonal: [K] to put in place of its own.
        order: [K] int64, of the factor's channels.
        dampening_frac: as :func:`feedback_of` takes it.

    Raises:
        ValueError: if the Hessian is not finite, or not positive definite at any dampening tried.
    """
    if not torch.isfinite(hessian).all():
        raise ValueError("the Hessian holds NaN or infinity: calibration activations overflowed")
    diagonal = diagonal[order]
    while dampening_frac <= _MAX_DAMPENING:
        matrix = hessian[order[:, None], order]
        matrix.diagonal().copy_(diagonal + dampening_frac * diagonal.mean())
        # Symmetric, so that its transpose has LAPACK's order of columns and is overwritten.
        matrix, failed = _cholesky(matrix.mT, upper=False)
        if not failed:
            matrix = torch.cholesky_inverse(matrix, out=None if matrix.is_cuda else matrix)
            matrix, failed = _cholesky(matrix, upper=True)
            if not failed:
                return matrix
        del matrix
        dampening_frac *= 10
    raise ValueError("the Hessian is not positive definite even with 100 % dampening")


def _cholesky(matrix: torch.Tensor, *, upper: bool) -> tuple[torch.Tensor, bool]:
    """The factor of a symmetric matrix, in its place on a CPU, and whether there is none."""
    info = torch.empty((), dtype=torch.int32)
    place = None if matrix.is_cuda else (matrix, info)
    factor, failed = torch.linalg.cholesky_ex(matrix, upper=upper, out=place)
    return factor, bool(failed)


def _round_with_feedback(
    remaining: torch.Tensor,
    factor: torch.Tensor,
    rounding: ColumnRounding,
    kept: torch.Tensor | None,
) -> None:
    """The inner loop; every argument in visiting order.

    Args:
        remaining: [K, N] fp32 weights, overwritten by values on the grid.
        factor: [K, K] from :func:`inverse_cholesky`.
        rounding: of one channel onto its grid.
        kept: [K, N] bool, False where weights are pruned; None where none is.
    """
    k = remaining.shape[0]
    for start in range(0, k, _LAZY_BLOCK):
        stop = min(start + _LAZY_BLOCK, k)
        block = remaining[start:stop]
        errors = torch.empty_like(block)
        local = factor[start:stop, start:stop]
        for i in range(stop - start):
            values = rounding(start + i, block[i])
            if kept is not None:
                values = values * kept[start + i]
            error = (block[i] - values) / local[i, i]
            block[i + 1 :].addr_(local[i, i + 1 :], error, alpha=-1)
            block[i] = values
            errors[i] = error
        remaining[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
