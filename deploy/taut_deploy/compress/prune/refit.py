"""Given a mask, the weights that stay get the values that reproduce the layer's output best.

Source: Boža, "Fast and effective weight update for pruned large language models",
arXiv:2401.02938, §3 (ADMM on the layer-wise problem, one inverse for all rows).
"""

import torch


def refit(
    weight: torch.Tensor,
    start: torch.Tensor,
    mask: torch.Tensor,
    hessian: torch.Tensor,
    *,
    iterations: int = 20,
    dampening_frac: float = 0.01,
) -> torch.Tensor:
    """Least squares for every row over the channels that its mask keeps.

    Args:
        weight: [N, K] fp32, the layer whose output is wanted.
        start: [N, K] fp32, a first solution, zero where pruned.
        mask: [N, K] bool, True where kept.
        hessian: [K, K] fp32, mean of ``x xᵀ`` over calibration tokens.
        iterations: steps of the alternating method.
        dampening_frac: share of the mean diagonal added to the diagonal.

    Returns:
        [N, K] fp32, zero where pruned; never worse than ``start`` in the dampened output error.
    """
    # Channels of equal scale make one penalty fit all of them.
    damped = hessian.clone()
    damped.diagonal().add_(dampening_frac * hessian.diagonal().mean())
    norm = damped.diagonal().clamp(min=1e-12).sqrt()
    gram = damped / norm[:, None] / norm[None, :]
    wanted = (weight * norm) @ gram
    penalty = 1.0
    eye = torch.eye(len(gram), device=gram.device, dtype=gram.dtype)
    inverse = torch.linalg.inv(gram + penalty * eye)
    sparse = start * norm
    dual = torch.zeros_like(sparse)
    best, best_error = sparse, _error(sparse - weight * norm, gram)
    for _ in range(iterations):
        dense = (wanted + penalty * (sparse - dual)) @ inverse
        sparse = (dense + dual) * mask
        dual = dual + dense - sparse
        error = _error(sparse - weight * norm, gram)
        better = error < best_error
        best = torch.where(better[:, None], sparse, best)
        best_error = torch.where(better, error, best_error)
    return best / norm


def _error(difference: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Squared output error of every row, [N]."""
    return ((difference @ gram) * difference).sum(1)
