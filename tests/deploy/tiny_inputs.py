"""Inputs for the tests of compression methods."""

from __future__ import annotations

import torch


def correlated(tokens: int, k: int, seed: int = 0) -> torch.Tensor:
    """Inputs [tokens, k] whose channels are strongly correlated and of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(k, k, generator=generator) * torch.logspace(0, -2, k)[:, None]
    return torch.randn(tokens, k, generator=generator) @ mixing
