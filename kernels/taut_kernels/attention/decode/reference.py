"""Paged decode in plain torch: the specification, and the op's CPU implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from taut_kernels.attention.reference import seen_keys


def gathered(cache: Tensor, pages: Tensor, count: int) -> Tensor:
    """Return the first ``count`` rows of a sequence's pages, [count, Hk, D], as they are stored."""
    # Indexing knows no 8-bit floats; bytes it knows.
    plain = cache.view(torch.uint8) if cache.element_size() == 1 else cache
    rows = plain[pages].flatten(0, 1)[:count]
    return rows.view(cache.dtype) if cache.element_size() == 1 else rows


def _by_head(scale: Tensor | None, heads: int, like: Tensor) -> Tensor:
    if scale is None:
        return like.new_ones(heads)
    return scale.to(like.dtype).reshape(-1).expand(heads)


def _attended(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, k_scales: Tensor, operand: torch.dtype
) -> Tensor:
    """Attend in one sequence.

    Args:
        q: [T, Hk, G, D], the query heads by key head.
        k: [N, Hk, D].
        v: likewise.
        seen: [T, N] bool.
        k_scales: [Hk], factors of the scores.
        operand: what the weights are rounded to before their product with the values.

    Returns:
        [T, Hk, G, D]; 0 where no key is seen.
    """
    scores = torch.einsum("tkgd,nkd->tkgn", q, k)
    scores *= k_scales[:, None, None]
    scores = scores.masked_fill(~seen[:, None, None, :], float("-inf"))
    highest = scores.amax(-1, keepdim=True)
    highest = highest.masked_fill(highest == float("-inf"), 0.0)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("tkgn,nkd->tkgd", weights.to(operand).to(q.dtype), v)
    return out / total.masked_fill(total == 0, 1.0)


def paged_decode_ref(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    arrivals: Tensor | None,
    max_context: int,
    window: int,
    scale: float,
) -> Tensor:
    """Attend in plain torch; fp64 queries give fp64 without roundings, for gold results.

    Args:
        q: [B, T, Hq, D], floating point.
        k_cache: [pages, page size, Hk, D].
        v_cache: likewise.
        block_table: [B, most pages] int32.
        context_lens: [B] int32.
        k_scale: [Hk] or one element, or None.
        v_scale: likewise.
        arrivals: not needed here.
        max_context: not needed here.
        window: keys a query sees, 0 for all.
        scale: factor of the scores.

    Returns:
        [B, T, Hq, D] as ``q``.

    Raises:
        ValueError: a page of a context that the cache does not have. Not checked on a GPU.
    """
    kind = torch.promote_types(q.dtype, torch.float32)
    count_q, heads, heads_k = q.shape[1], q.shape[2], k_cache.shape[2]
    page_size = k_cache.shape[1]
    most = block_table.shape[1] * page_size
    operand = torch.float16 if v_cache.element_size() == 1 else v_cache.dtype
    operand = kind if q.dtype == torch.float64 else operand
    k_scales = _by_head(k_scale, heads_k, q.new_empty(0, dtype=kind)) * scale
    v_scales = _by_head(v_scale, heads_k, q.new_empty(0, dtype=kind))
    o = q.new_zeros(q.shape)
    for number, context in enumerate(context_lens.tolist()):
        count = min(max(context, 0), most)
        if count == 0:
            continue
        pages = block_table[number, : -(-count // page_size)].long()
        if wrong := [page for page in pages.tolist() if not 0 <= page < k_cache.shape[0]]:
            raise ValueError(
                f"block_table must name pages in 0..{k_cache.shape[0] - 1} up to a sequence's "
                f"context, got {wrong[0]} for sequence {number}"
            )
        k = gathered(k_cache, pages, count).to(kind)
        v = gathered(v_cache, pages, count).to(kind)
        grouped = q[number].to(kind).view(count_q, heads_k, heads // heads_k, -1)
        seen = seen_keys(count_q, count, True, window).to(q.device)
        out = _attended(grouped, k, v, seen, k_scales, operand) * v_scales[:, None, None]
        o[number] = out.reshape(count_q, heads, -1).to(q.dtype)
    return o
