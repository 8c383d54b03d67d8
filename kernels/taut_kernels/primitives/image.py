"""What convolution and pooling share: images [N, C, H, W], pairs of sizes, memory formats."""

from __future__ import annotations

import torch
from torch import Tensor

Pair = tuple[int, int]


def pair(name: str, value: int | tuple[int, ...] | list[int], least: int) -> Pair:
    """Return (along H, along W) of an option given once or twice.

    Args:
        name: of the option, for errors.
        value: one number, or two.
        least: smallest allowed.

    Raises:
        ValueError: not one or two integers of at least ``least``.
    """
    both = (value, value) if isinstance(value, int) else tuple(value)
    if len(both) != 2 or not all(isinstance(one, int) and one >= least for one in both):
        raise ValueError(f"{name} must be one or two integers of at least {least}, got {value!r}")
    return both


def output_size(size: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> int:
    """Return how many windows fit along one side, less than 1 where none does."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def is_channels_last(x: Tensor) -> bool:
    """Say whether an image's channels are next to each other in memory, as torch would.

    Contiguous images that are both (one channel, or one pixel) count as not.
    """
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def check_image(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Hold an image to what these ops take.

    Args:
        name: of the argument, for errors.
        x: should be [N, C, H, W].
        dtypes: allowed.

    Raises:
        ValueError: another dtype or number of dimensions, or it requires grad.
    """
    if x.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} must be {names}, got {str(x.dtype).removeprefix('torch.')}")
    if x.dim() != 4:
        raise ValueError(f"{name} must have shape [N, C, H, W], got {tuple(x.shape)}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{name} requires grad: the op is forward only, call it under no_grad()")
