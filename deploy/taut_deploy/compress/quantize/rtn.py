"""Round to nearest: the data-free baseline every other method must beat."""

import torch

from taut_deploy.compress.quantize.grid import GridSpec, QuantizedWeight, encode, fit_grid


def quantize_weight(
    weight: torch.Tensor, spec: GridSpec, importance: torch.Tensor | None = None
) -> QuantizedWeight:
    """Round each weight to its group's nearest code.

    Args:
        weight: [N, K] fp32.
        spec: the grid.
        importance: [K] weight of each input channel's error in the choice of the grid, or None.

    Returns:
        Codes with scales and zero points.
    """
    scale, zero = fit_grid(weight, spec, importance)
    return QuantizedWeight(encode(weight, scale, zero, spec).to(torch.int8), scale, zero)
