"""What every program that measures a card asks first."""

from __future__ import annotations

import sys

import torch


def missing(program: str) -> bool:
    """Say in one line that a program needs a CUDA device, where there is none.

    Args:
        program: its module, as ``taut_bench.fused``.

    Returns:
        Whether there is none.
    """
    if torch.cuda.is_available():
        return False
    sys.stderr.write(f"error: {program} needs a CUDA device\n")
    return True
