"""SmoothQuant: divide an input channel by ``s``, multiply its weights by ``s``: the same product.

Source: SmoothQuant, arXiv:2211.10438, §4: ``s = max|x|**alpha / max|w|**(1 - alpha)``. The paper
gives no ``alpha`` per layer; here it is chosen per input group by the measured error of the
quantised product, the search idea being that of AWQ (arXiv:2306.00978, §3.2).
"""

from collections.abc import Callable, Sequence

import torch

CANDIDATE_ALPHAS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

# quantised product of a sample of inputs with one weight: (x [T, K], w [N, K]) -> [T, N]
QuantizedProduct = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def smoothing_scales(
    input_absmax: torch.Tensor, weights: Sequence[torch.Tensor], alpha: float
) -> torch.Tensor:
    """Per-channel factors ``s`` for one input group.

    Args:
        input_absmax: [K] largest magnitude seen per input channel.
        weights: the linear layers fed by this input, each [N_i, K].
        alpha: migration strength; 0 leaves activations to the weights' scale, 1 moves everything.

    Returns:
        [K] fp32, positive, 1 for channels never active; geometric mean 1.
    """
    weight_absmax = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    active = (input_absmax > 0) & (weight_absmax > 0)
    scales = input_absmax.clamp(min=1e-5).pow(alpha) / weight_absmax.clamp(min=1e-5).pow(1 - alpha)
    scales = scales / scales[active].log().mean().exp() if active.any() else torch.ones_like(scales)
    return torch.where(active, scales.clamp(1e-3, 1e3), torch.ones_like(scales))


def choose_scales(
    sample: torch.Tensor,
    input_absmax: torch.Tensor,
    weights: Sequence[torch.Tensor],
    product: QuantizedProduct,
    alpha: float | None,
    tie: Callable[[torch.Tensor], torch.Tensor] = lambda scales: scales,
) -> torch.Tensor:
    """The factors with the smallest quantised output error, or those of a given ``alpha``.

    Args:
        sample: [T, K] fp32 input rows to judge on.
        input_absmax: [K].
        weights: each [N_i, K] fp32.
        product: how the scheme multiplies.
        alpha: fixed strength, or None to search; the search may keep all factors at 1.
        tie: makes factors equal where channels share a producer (grouped-query heads).

    Returns:
        [K] fp32 factors.
    """
    if alpha is not None:
        return tie(smoothing_scales(input_absmax, weights, alpha))
    exact = [sample @ weight.T for weight in weights]
    candidates = [torch.ones_like(input_absmax)]
    candidates += [tie(smoothing_scales(input_absmax, weights, a)) for a in CANDIDATE_ALPHAS]

    def error_of(scales: torch.Tensor) -> float:
        smoothed = sample / scales
        products = (product(smoothed, weight * scales) for weight in weights)
        # Relative per layer: otherwise the layer with the largest outputs alone decides.
        return sum(
            float((got - want).square().sum() / want.square().sum().clamp(min=1e-20))
            for got, want in zip(products, exact, strict=True)
        )

    return min(candidates, key=error_of)
