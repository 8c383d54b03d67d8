"""What every launcher shares: where output memory comes from and which GPU it runs on.

Launchers allocate through :func:`empty` so that a test can replace it by an allocator that fills
with NaN (:func:`taut_kernels.testing.nan_poison`): an element a kernel forgets to write then shows.
"""

from __future__ import annotations

from functools import cache

import torch


def empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate an uninitialised contiguous tensor; the seam the NaN poison replaces."""
    return torch.empty(shape, dtype=dtype, device=device)


@cache
def _cuda_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


def gpu_name(device: torch.device) -> str | None:
    """Name the GPU a tensor lives on, as ``tiles/*.json`` spells it.

    Args:
        device: where the operands are.

    Returns:
        For example ``"NVIDIA H100 80GB HBM3"``; None for a CPU tensor (the Triton interpreter).
    """
    if device.type != "cuda":
        return None
    return _cuda_name(torch.cuda.current_device() if device.index is None else device.index)
