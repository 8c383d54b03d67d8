"""Magnitude pruning: the smallest weights go. The baseline every other method must beat.

Source: Han et al., "Learning both weights and connections", arXiv:1506.02626, §3. Unstructured
masks compare all weights of one layer.
"""

import torch

from taut_deploy.compress.prune.patterns import Pattern, keep_highest


def mask(weight: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Which weights stay.

    Args:
        weight: [N, K].
        pattern: n:m or a share of the layer.

    Returns:
        [N, K] bool, True where a weight is kept.

    Raises:
        ValueError: the pattern's runs do not divide K.
    """
    size = weight.abs()
    if pattern.run is not None:
        return keep_highest(size, pattern)
    return keep_highest(size.reshape(1, -1), pattern).view_as(weight)
