"""AWQ: scale up the input channels that matter, so that rounding hurts them less.

Source: AWQ, arXiv:2306.00978, §3.2: ``s = mean|x|**alpha`` with ``alpha`` found on a grid by the
error of the quantised product. Here a channel's size is its root mean square, and the error is
taken over all calibration tokens at once, through the Hessian. The second family of candidates
divides by the weights' own size, as the authors' later code does.
"""

from collections.abc import Callable, Sequence

import torch

CANDIDATE_ALPHAS = tuple(step / 20 for step in range(1, 20))

# A weight [N, K] as it is after rounding.
Rounding = Callable[[torch.Tensor], torch.Tensor]


def channel_scales(
    input_square: torch.Tensor,
    weights: Sequence[torch.Tensor],
    alpha: float,
    *,
    by_weight: bool = False,
) -> torch.Tensor:
    """Per-channel factors ``s``; weights are multiplied, inputs divided by them.

    Args:
        input_square: [K] mean squared input of every channel.
        weights: the layers fed by this input, each [N_i, K].
        alpha: strength; 0 leaves everything as it is (unless ``by_weight``).
        by_weight: also divide by the mean relative size of the weights to ``1 - alpha``.

    Returns:
        [K] fp32, positive, 1 for channels never active; geometric middle of the extremes 1.
    """
    size = input_square.clamp(min=0).sqrt()
    active = size > 0
    scales = size.clamp(min=1e-6).pow(alpha)
    if by_weight:
        relative = [w.abs() / w.abs().amax(1, keepdim=True).clamp(min=1e-12) for w in weights]
        scales = scales / torch.cat(relative).mean(0).clamp(min=1e-6).pow(1 - alpha)
    if not active.any():
        return torch.ones_like(scales)
    scales = scales / (scales[active].max() * scales[active].min()).sqrt()
    return torch.where(active, scales.clamp(1e-3, 1e3), torch.ones_like(scales))


def choose_scales(
    hessian: torch.Tensor,
    weights: Sequence[torch.Tensor],
    rounding: Rounding,
    tie: Callable[[torch.Tensor], torch.Tensor] = lambda scales: scales,
) -> torch.Tensor:
    """The factors with the smallest error of the quantised layers' outputs.

    Args:
        hessian: [K, K] fp32, mean of ``x xᵀ`` over calibration tokens.
        weights: the layers fed by this input, each [N_i, K] fp32.
        rounding: how the scheme rounds a weight; rounding to nearest is enough to compare.
        tie: makes factors equal where channels share a producer (grouped-query heads).

    Returns:
        [K] fp32; all 1 where no candidate is better than leaving the layers alone.
    """
    square = hessian.diagonal()
    candidates = [torch.ones_like(square)]
    candidates += [
        tie(channel_scales(square, weights, alpha, by_weight=by_weight))
        for by_weight in (False, True)
        for alpha in CANDIDATE_ALPHAS
    ]
    powers = [output_power(weight, hessian).clamp(min=1e-20) for weight in weights]

    def error_of(scales: torch.Tensor) -> float:
        errors = (rounding(weight * scales) / scales - weight for weight in weights)
        # Relative per layer: otherwise the layer with the largest outputs alone decides.
        return sum(
            float(output_power(error, hessian) / power)
            for error, power in zip(errors, powers, strict=True)
        )

    return min(candidates, key=error_of)


def output_power(weight: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Mean squared output of a layer, summed over output channels: ``tr(W H Wᵀ)``."""
    return ((weight @ hessian) * weight).sum()
