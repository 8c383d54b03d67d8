"""Low-rank residual: what rounding got wrong, given back by two thin matrices.

Sources: LQER, arXiv:2402.02446, §3 (SVD of the rounding error, scaled by the inputs) and EoRA,
arXiv:2410.21271, §3 (the scaling by the Hessian itself). Rounding and factors alternate as in
LoftQ, arXiv:2310.08659, §3: each pass rounds what the factors leave over.
"""

from collections.abc import Callable

import torch

from taut_deploy.compress.lowrank.whitened_svd import Factors, whiten
from taut_deploy.compress.quantize.grid import QuantizedWeight

# A weight [N, K] to its codes.
Quantizer = Callable[[torch.Tensor], QuantizedWeight]


def compensate(
    weight: torch.Tensor, rounded: torch.Tensor, hessian: torch.Tensor, rank: int
) -> Factors:
    """Factors of the error that lose least of the layer's output.

    Args:
        weight: [N, K] fp32.
        rounded: [N, K] fp32, the same after rounding.
        hessian: [K, K] fp32, mean of ``x xᵀ`` over calibration tokens.
        rank: inner width of the factors.

    Raises:
        ValueError: the rank does not fit, or the Hessian is not finite.
    """
    return whiten(weight - rounded, hessian).truncate(rank)


def quantize_with_residual(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    rank: int,
    quantizer: Quantizer,
    *,
    passes: int = 4,
    stored_dtype: torch.dtype = torch.float32,
) -> tuple[QuantizedWeight, Factors]:
    """Codes and factors with ``dequantize() + up @ down ≈ weight``.

    Args:
        weight: [N, K] fp32.
        hessian: [K, K] fp32.
        rank: inner width of the factors.
        quantizer: rounds a weight.
        passes: how often the weight less the factors is rounded anew.
        stored_dtype: dtype the factors are stored in.

    Returns:
        The pass of least output error.

    Raises:
        ValueError: the rank does not fit, or the Hessian is not finite.
    """
    factors: Factors | None = None
    best: tuple[float, QuantizedWeight, Factors] | None = None
    for _ in range(max(1, passes)):
        left = weight if factors is None else weight - factors.product()
        quantized = quantizer(left)
        rounded = quantized.dequantize()
        exact = compensate(weight, rounded, hessian, rank)
        factors = Factors(exact.up.to(stored_dtype).float(), exact.down.to(stored_dtype).float())
        difference = weight - rounded - factors.product()
        error = float(((difference @ hessian) * difference).sum())
        if best is None or error < best[0]:
            best = (error, quantized, factors)
    if best is None:
        raise AssertionError("there is at least one pass")
    return best[1], best[2]
