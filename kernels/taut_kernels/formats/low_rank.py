"""Low-rank product: ``y = (x @ weight_vᵀ) @ weight_uᵀ``, the dense weight never made.

Shapes    x [..., K]   weight_v [r, K]   weight_u [N, r]   → y [..., N]
Numerics  each product as torch makes it in the operands' dtype; what is between is rounded to it
Source    Low-rank factors of a linear layer: SVD-LLM, arXiv:2403.07378, §3
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear


def low_rank_linear(
    x: torch.Tensor, down: torch.Tensor, ups: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Multiply by the factors of one layer, or of several that read the same input.

    Args:
        x: [..., K].
        down: [Σr, K], the parts' ``weight_v`` one under another.
        ups: the parts' ``weight_u``, [Nᵢ, rᵢ].

    Returns:
        [..., ΣN], the parts' outputs one after another.
    """
    inner = linear(x, down)
    if len(ups) == 1:
        return linear(inner, ups[0])
    narrow = torch.split(inner, [up.shape[1] for up in ups], dim=-1)
    return torch.cat([linear(part, up) for part, up in zip(narrow, ups, strict=True)], dim=-1)
