"""HQQ: choose scales and zero points without data, by a robust error of the weights themselves.

Source: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", Mobius
Labs, 2023: ``min over the grid of |W - Q(W)|_p`` with p < 1, split in two steps that alternate. An
error matrix absorbs the outliers (a shrinkage), then the grid is fitted to what is left. The
source moves a fractional zero point alone. Ours is an integer, as it is stored, so the scale is
fitted by least squares and the zero point rounded.
"""

import torch

from taut_deploy.compress.quantize.grid import GridSpec, QuantizedWeight, encode, fit_grid

_NORM = 0.7
_STEPS = 20
_PENALTY = 10.0
_PENALTY_GROWTH = 1.01


def quantize_weight(weight: torch.Tensor, spec: GridSpec) -> QuantizedWeight:
    """Round a weight on the grid of least ``|error|**0.7``.

    Args:
        weight: [N, K] fp32.
        spec: the grid.

    Returns:
        Codes with scales and zero points; never worse in that error than plain rounding.
    """
    n = weight.shape[0]
    scale, zero = fit_grid(weight, spec)
    grouped = weight.view(n, scale.shape[1], -1)
    best_scale = scale.float()
    best_zero = torch.zeros_like(best_scale) if zero is None else zero.float()
    best_error = torch.full_like(best_scale, torch.inf)
    scale, offset = best_scale, best_zero
    # Penalties are meant for weights of order one.
    unit = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    penalty = _PENALTY
    for _ in range(_STEPS):
        codes = _codes(weight, scale, offset, spec)
        error = grouped - (codes - offset[..., None]) * scale[..., None]
        size = error.abs().pow(_NORM).sum(-1)
        better = size < best_error
        best_error = torch.where(better, size, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, offset, best_zero)
        target = grouped - _shrink(error / unit, penalty) * unit
        scale, offset = _fit(target, codes, offset, scale, spec)
        penalty *= _PENALTY_GROWTH
    stored_scale = best_scale.to(spec.scale_dtype)
    stored_zero = None if spec.symmetric else best_zero.to(torch.int8)
    codes = encode(weight, stored_scale, stored_zero, spec)
    return QuantizedWeight(codes.to(torch.int8), stored_scale, stored_zero)


def _codes(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, spec: GridSpec
) -> torch.Tensor:
    return encode(weight, scale, zero, spec).view(*scale.shape, -1)


def _shrink(error: torch.Tensor, penalty: float) -> torch.Tensor:
    """Generalised soft threshold: the minimiser of ``|e|**p + penalty/2 (e - error)²``."""
    size = error.abs()
    threshold = size.clamp(min=1e-8).pow(_NORM - 1) / penalty
    return error.sign() * (size - threshold).clamp(min=0)


def _fit(
    target: torch.Tensor,
    codes: torch.Tensor,
    zero: torch.Tensor,
    scale: torch.Tensor,
    spec: GridSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point [N, G] that bring fixed codes [N, G, g] closest to ``target``."""
    if not spec.symmetric:
        zero = (codes - target / scale[..., None]).mean(-1).round().clamp(spec.low, spec.high)
    steps = codes - zero[..., None]
    energy = steps.square().sum(-1)
    fitted = (steps * target).sum(-1) / energy.clamp(min=1e-12)
    fitted = torch.where(energy > 0, fitted, scale).to(spec.scale_dtype).float()
    return torch.where(fitted * scale > 0, fitted, scale), zero
