"""Round to nearest: the data-free baseline every other method must beat."""

from typing import TypeVar

import torch

from taut_deploy.compress.quantize.protocol import Codes, Spec

C = TypeVar("C", bound=Codes)


def quantize_weight(
    weight: torch.Tensor, spec: Spec[C], importance: torch.Tensor | None = None
) -> C:
    """Round each weight to the nearest value of its grid.

    Args:
        weight: [N, K] any float dtype.
        spec: the grid's shape.
        importance: [K] weight of each input channel's error in the choice of the grid, or None.

    Returns:
        Codes with what they are measured in.
    """
    return spec.fit(weight, importance).encode(weight)
