"""Wanda: a weight counts by its size times the norm of the input it meets.

Source: Wanda, arXiv:2306.11695, §3 (score ``|w| * ||x||``, compared within one output row).
"""

import torch

from taut_deploy.compress.prune.patterns import Pattern, keep_highest


def mask(weight: torch.Tensor, input_square: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Which weights stay.

    Args:
        weight: [N, K].
        input_square: [K] mean squared input of every channel: the diagonal of the Hessian.
        pattern: n:m or a share of every row.

    Returns:
        [N, K] bool, True where a weight is kept.

    Raises:
        ValueError: the pattern's runs do not divide K.
    """
    return keep_highest(weight.abs() * input_square.clamp(min=0).sqrt(), pattern)
