"""Whitened SVD: replace a weight by two thin ones that lose least of the layer's *output*.

Source: SVD-LLM, arXiv:2403.07378, §3.1: with ``H = S Sᵀ`` the error of dropping a singular value
of ``W S`` is that value itself. The paper gives every layer the same ratio; here a budget is spent
where a parameter saves most error (:func:`allocate_ranks`), a layer that gains nothing stays dense.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

_MAX_DAMPENING = 1.0


@dataclass(frozen=True)
class Factors:
    """``weight ≈ up @ down``.

    Args:
        up: [N, r].
        down: [r, K].
    """

    up: torch.Tensor
    down: torch.Tensor

    @property
    def rank(self) -> int:
        """Inner width r."""
        return self.down.shape[0]

    def product(self) -> torch.Tensor:
        """The dense weight they stand for, [N, K] fp32."""
        return self.up.float() @ self.down.float()


@dataclass(frozen=True)
class Spectrum:
    """The whitened singular value decomposition of one weight.

    Args:
        left: [N, q] orthonormal columns, q = min(N, K).
        values: [q] falling; the square of one is the output error of dropping it.
        right: [q, K] whitened right vectors, taken back to the inputs.
        shape: (N, K).
    """

    left: torch.Tensor
    values: torch.Tensor
    right: torch.Tensor
    shape: tuple[int, int]

    def truncate(self, rank: int) -> Factors:
        """The best factors of that rank.

        Raises:
            ValueError: the rank is below 1 or above the smaller width.
        """
        if not 1 <= rank <= len(self.values):
            raise ValueError(
                f"rank {rank} does not fit a layer of {self.shape[0]} x {self.shape[1]}: take 1 to "
                f"{len(self.values)}"
            )
        # Split evenly, so that neither factor is much larger than the other in 16 bits.
        root = self.values[:rank].sqrt()
        return Factors(self.left[:, :rank] * root, root[:, None] * self.right[:rank])

    @property
    def largest_useful_rank(self) -> int:
        """Above this rank two factors hold more numbers than the weight."""
        n, k = self.shape
        return (n * k - 1) // (n + k)


def whiten(
    weight: torch.Tensor, hessian: torch.Tensor, *, dampening_frac: float = 0.001
) -> Spectrum:
    """Decompose a weight as its inputs see it.

    Args:
        weight: [N, K] fp32.
        hessian: [K, K] fp32, mean of ``x xᵀ`` over calibration tokens.
        dampening_frac: share of the mean diagonal added to the diagonal; grows tenfold while the
            matrix is not positive definite.

    Raises:
        ValueError: the Hessian is not finite, or not positive definite at any dampening tried.
    """
    factor = whitening_factor(hessian, dampening_frac)
    left, values, right = torch.linalg.svd(weight.double() @ factor, full_matrices=False)
    back = torch.linalg.solve_triangular(factor, right, upper=False, left=False)
    return Spectrum(left.float(), values.float(), back.float(), (weight.shape[0], weight.shape[1]))


def whitening_factor(hessian: torch.Tensor, dampening_frac: float) -> torch.Tensor:
    """Lower Cholesky factor ``S`` of the dampened Hessian, [K, K] fp64.

    Raises:
        ValueError: the Hessian is not finite, or not positive definite at any dampening tried.
    """
    if not torch.isfinite(hessian).all():
        raise ValueError("the Hessian holds NaN or infinity: calibration activations overflowed")
    exact = hessian.double()
    mean = exact.diagonal().mean().clamp(min=1e-12)
    while dampening_frac <= _MAX_DAMPENING:
        dampened = exact.clone()
        dampened.diagonal().add_(dampening_frac * mean)
        lower: torch.Tensor
        lower, failed = torch.linalg.cholesky_ex(dampened)
        if not failed:
            return lower
        dampening_frac *= 10
    raise ValueError("the Hessian is not positive definite even with 100 % dampening")


def allocate_ranks(
    values: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, int]],
    budget: int,
    *,
    multiple_of: int = 8,
) -> dict[str, int | None]:
    """Ranks whose factors fit a number of parameters and lose least output, relative per layer.

    Parameters go, ``multiple_of`` ranks at a time, to the layer where they save most per parameter.

    Args:
        values: singular values of each layer, falling, as in :class:`Spectrum`.
        shapes: (N, K) of each layer.
        budget: parameters that all layers together may have.
        multiple_of: ranks are multiples of it, which kernels like.

    Returns:
        A rank for each layer, or None where the layer stays dense.

    Raises:
        ValueError: not even one step of rank for every layer fits.
    """
    ranks = dict.fromkeys(values, 0)
    spent = 0
    gains: dict[str, torch.Tensor] = {}
    for name, sigma in values.items():
        n, k = shapes[name]
        share = sigma.double().square()
        share = share / share.sum().clamp(min=1e-30)
        usable = len(sigma) // multiple_of * multiple_of
        gains[name] = share[:usable].view(-1, multiple_of).sum(1) / (multiple_of * (n + k))
    costs = {name: multiple_of * sum(shapes[name]) for name in values}
    if sum(costs.values()) > budget:
        raise ValueError(
            f"{budget} parameters are too few: rank {multiple_of} of every layer takes "
            f"{sum(costs.values())}"
        )
    steps = sorted(
        ((-float(g), i, name) for name, all_gains in gains.items() for i, g in enumerate(all_gains))
    )
    dense: set[str] = set()
    # The first step of every layer is given anyway, so that none ends empty.
    for name in values:
        ranks[name], spent = multiple_of, spent + costs[name]
    for _, index, name in steps:
        if index == 0 or name in dense:
            continue
        n, k = shapes[name]
        cost = costs[name]
        if (ranks[name] + multiple_of) * (n + k) >= n * k:
            cost = n * k - ranks[name] * (n + k)  # what is left to having it whole
        if spent + cost > budget:
            continue
        spent += cost
        if cost < costs[name] or (ranks[name] + multiple_of) * (n + k) >= n * k:
            dense.add(name)
        else:
            ranks[name] += multiple_of
    return {name: None if name in dense else rank for name, rank in ranks.items()}
