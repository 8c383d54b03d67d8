"""Whitened SVD: replace a weight by two thin ones that lose least of the layer's *output*.

Source: SVD-LLM, arXiv:2403.07378, §3.1: with ``H = S Sᵀ`` the error of dropping a singular value
of ``W S`` is that value itself. As in the paper, every layer keeps the same share of its
parameters: spending them where they lower the sum of the layers' relative errors most makes the
model worse, since the layers' errors do not weigh alike in its output.
"""

from dataclasses import dataclass

import torch

_MAX_DAMPENING = 1.0


@dataclass(frozen=True)
class Factors:
    """``weight ≈ up @ down``.

    Args:
        up: [N, r], or [N - r, r] in the interpolative form.
        down: [r, K].
        order: [N] int32, which row of ``(down, up @ down)`` each output is, in that form.
    """

    up: torch.Tensor
    down: torch.Tensor
    order: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        """Inner width r."""
        return self.down.shape[0]

    def product(self) -> torch.Tensor:
        """The dense weight they stand for, [N, K] fp32."""
        return product_of(self.up.float(), self.down.float(), self.order)


def product_of(
    up: torch.Tensor, down: torch.Tensor, order: torch.Tensor | None = None
) -> torch.Tensor:
    """The dense weight [N, K] of factors in either form, differentiable in both."""
    product = up @ down
    return product if order is None else torch.cat([down, product]).index_select(0, order)


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
    seen = weight.double() @ factor
    # By the eigenvectors of the smaller Gram matrix: half the time of an SVD, and exact to the
    # square root of fp64's rounding, far below what factors are stored in.
    tall = seen.shape[0] > seen.shape[1]
    squares, vectors = torch.linalg.eigh(seen.T @ seen if tall else seen @ seen.T)
    values, vectors = squares.flip(0).clamp(min=0).sqrt(), vectors.flip(1)
    safe = values.clamp(min=1e-12 * float(values[0]) + 1e-30)
    left = seen @ vectors / safe if tall else vectors
    right = vectors.T if tall else (vectors / safe).T @ seen
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
