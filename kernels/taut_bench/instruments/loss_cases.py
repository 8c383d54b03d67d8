"""The losses by name, with inputs drawn for given sizes; each can run its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from taut_kernels.loss.cross_entropy import cross_entropy
from taut_kernels.loss.linear_cross_entropy import linear_cross_entropy
from taut_kernels.loss.linear_jsd import linear_jsd
from taut_kernels.loss.linear_kl import linear_kl

Sizes = Mapping[str, int]
LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
    "linear_kl": linear_kl,
    "linear_jsd": linear_jsd,
}
"""Name → the public function."""


def _leaf(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, scale: float = 1.0
) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    drawn = (torch.randn(shape, generator=generator) * scale).to(device, dtype)
    return drawn.requires_grad_()


def _target(sizes: Sizes, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(sizes["M"])
    return torch.randint(0, sizes["V"], (sizes["M"],), generator=generator).to(device)


def logits_and_target(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Draw logits [M, V], a leaf with gradient, and targets [M]."""
    return _leaf((sizes["M"], sizes["V"]), dtype, device), _target(sizes, device)


def projection_and_target(
    sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> tuple[Any, ...]:
    """Draw x [M, H] and weight [V, H], leaves with gradient, and targets [M]."""
    M, H, V = sizes["M"], sizes["H"], sizes["V"]
    weight = _leaf((V, H), dtype, device, H**-0.5)
    return _leaf((M, H), dtype, device), weight, _target(sizes, device)


def two_projections(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Draw the student's x [M, H] and weight [V, H], leaves, and the teacher's, detached."""
    student = projection_and_target(sizes, dtype, device)[:2]
    teacher_sizes = {**sizes, "H": sizes["Ht"]}
    teacher = projection_and_target(teacher_sizes, dtype, device)[:2]
    return *student, *(tensor.detach() for tensor in teacher)
