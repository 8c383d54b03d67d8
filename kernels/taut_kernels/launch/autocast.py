"""Keeps a caller's autocast out of the CPU implementations: an op computes as its contract says.

Autocast reaches into an implementation: a product of fp32 there comes back as bf16 or fp16, rounded
once more than the contract has it. Products that are given ``out=`` are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(implementation: Callable[P, R]) -> Callable[P, R]:
    """Return a CPU implementation that computes alike with autocast and without.

    Args:
        implementation: of an op, for CPU tensors.
    """

    @wraps(implementation)
    def run(*arguments: P.args, **named: P.kwargs) -> R:
        # One for each call: it remembers what it is to restore.
        with torch.autocast("cpu", enabled=False):
            return implementation(*arguments, **named)

    return run
