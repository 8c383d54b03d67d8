"""Low-rank product: ``y = (x @ weight_vᵀ) @ weight_uᵀ``, the dense weight never made.

Shapes    x [..., K]   weight_v [r, K]   weight_u [N, r]   → y [..., N]
Forms     interpolative: r of the outputs are ``z = x @ weight_vᵀ`` itself, so that ``weight_u`` is
          [N - r, r]; ``weight_order`` [N] says which of ``(z, z @ weight_uᵀ)`` each output is
Numerics  each product as torch makes it in the operands' dtype; what is between is rounded to it
Source    Low-rank factors of a linear layer: SVD-LLM, arXiv:2403.07378, §3; interpolative form:
          Cheng et al., SIAM J. Sci. Comput. 26 (2005), §3
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear


def low_rank_linear(
    x: Tensor, down: Tensor, ups: Sequence[Tensor], orders: Sequence[Tensor | None] | None = None
) -> Tensor:
    """Multiply by the factors of one layer, or of several that read the same input.

    Args:
        x: [..., K].
        down: [Σr, K], the parts' ``weight_v`` one under another.
        ups: the parts' ``weight_u``, [Nᵢ, rᵢ] or [Nᵢ - rᵢ, rᵢ].
        orders: the parts' ``weight_order``, None for a part that has none.

    Returns:
        [..., ΣN], the parts' outputs one after another.
    """
    orders = [None] * len(ups) if orders is None else orders
    inner = linear(x, down)
    if len(ups) == 1:
        return _outputs(inner, ups[0], orders[0])
    narrow = torch.split(inner, [up.shape[1] for up in ups], dim=-1)
    parts = zip(narrow, ups, orders, strict=True)
    return torch.cat([_outputs(*part) for part in parts], dim=-1)


def _outputs(inner: Tensor, up: Tensor, order: Tensor | None) -> Tensor:
    """The outputs of one part, [..., N], from ``x @ weight_vᵀ`` [..., r]."""
    if order is None:
        return linear(inner, up)
    return torch.cat([inner, linear(inner, up)], dim=-1).index_select(-1, order)


def dense_rows(
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    rows: slice,
    orders: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Return rows of the dense weight that the factors of one or more layers stand for.

    Args:
        downs: the parts' ``weight_v``, [rᵢ, K].
        ups: the parts' ``weight_u``, [Nᵢ, rᵢ] or [Nᵢ - rᵢ, rᵢ].
        rows: of the parts' outputs one after another.
        orders: the parts' ``weight_order``, None for a part that has none.

    Returns:
        [rows, K] fp32.
    """
    orders = [None] * len(ups) if orders is None else orders
    found, first = [], 0
    for down, up, order in zip(downs, ups, orders, strict=True):
        n = up.shape[0] if order is None else order.shape[0]
        start, stop = (min(max(at - first, 0), n) for at in (rows.start, rows.stop))
        if order is None:
            found.append(up[start:stop].float() @ down.float())
        else:
            dense = torch.cat([down.float(), up.float() @ down.float()])
            found.append(dense.index_select(0, order[start:stop]))
        first += n
    return torch.cat(found)
