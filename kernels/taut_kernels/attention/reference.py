"""Attention in plain torch: the specification, and the ops' CPU implementation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def _spans(
    q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None
) -> Iterator[tuple[tuple[int | slice, ...], tuple[int | slice, ...]]]:
    """Yield of each sequence where its queries and its keys are."""
    if cu_q is None or cu_k is None:
        for number in range(q.shape[0]):
            yield (number,), (number,)
        return
    at_q, at_k = cu_q.tolist(), cu_k.tolist()
    for number in range(len(at_q) - 1):
        yield (
            (slice(at_q[number], at_q[number + 1]),),
            (slice(at_k[number], at_k[number + 1]),),
        )


def seen_keys(count_q: int, count_k: int, causal: bool, window: int) -> Tensor:
    """Return which keys each query of one sequence sees: [Tq, Tk] bool."""
    places = torch.arange(count_q)[:, None] + count_k - count_q
    keys = torch.arange(count_k)[None, :]
    seen = torch.ones(count_q, count_k, dtype=torch.bool)
    if causal:
        seen &= keys <= places
    if window:
        seen &= keys > places - window
    return seen


def _weights(
    q: Tensor, k: Tensor, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return weights [Hq, Tq, Tk] and lse [Hq, Tq] of one sequence, in fp32 or fp64."""
    kind = torch.promote_types(q.dtype, torch.float32)
    keys = k.to(kind).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("thd,nhd->htn", q.to(kind), keys) * scale
    seen = seen_keys(q.shape[0], k.shape[0], causal, window).to(q.device)
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    finite = lse.masked_fill(lse == float("-inf"), 0.0)
    return torch.exp(scores - finite[..., None]), lse


def attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend in plain torch; fp64 inputs give fp64 without roundings, for gold results.

    Args:
        q: [B, Tq, Hq, D] or packed [Σ Tq, Hq, D], floating point.
        k: [B, Tk, Hk, D] or packed.
        v: as ``k``.
        cu_q: bounds of packed sequences, or None.
        cu_k: likewise.
        max_q: not needed here.
        max_k: not needed here.
        causal: hide the keys behind a query.
        window: keys a query sees, 0 for all.
        scale: factor of the scores.

    Returns:
        The output, as ``q``, and lse, fp32 (fp64 of fp64), [B, Hq, Tq] or [Hq, Σ Tq].
    """
    kind = torch.promote_types(q.dtype, torch.float32)
    o = q.new_zeros(q.shape)
    by_token = torch.full(q.shape[:-1], float("-inf"), dtype=kind, device=q.device)
    for at_q, at_k in _spans(q, k, cu_q, cu_k):
        weights, lse = _weights(q[at_q], k[at_k], causal, window, scale)
        values = v[at_k].repeat_interleave(q.shape[-2] // k.shape[-2], dim=1)
        rounded = weights.to(v.dtype).to(kind)
        o[at_q] = torch.einsum("htn,nhd->thd", rounded, values.to(kind)).to(q.dtype)
        by_token[at_q] = lse.t()
    return o, by_token.transpose(-1, -2).contiguous()


def attention_backward_ref(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of :func:`attention_ref`, by the formulas and not by autograd."""
    kind = torch.promote_types(q.dtype, torch.float32)
    heads, heads_k = q.shape[-2], k.shape[-2]
    dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for at_q, at_k in _spans(q, k, cu_q, cu_k):
        weights, _ = _weights(q[at_q], k[at_k], causal, window, scale)
        gradient = do[at_q].to(kind)
        keys, values = (x[at_k].to(kind).repeat_interleave(heads // heads_k, dim=1) for x in (k, v))
        delta = (gradient * o[at_q].to(kind)).sum(-1).t()
        d_weights = torch.einsum("thd,nhd->htn", gradient, values)
        d_scores = (weights * (d_weights - delta[..., None])).to(q.dtype).to(kind)
        dq[at_q] = (torch.einsum("htn,nhd->thd", d_scores, keys) * scale).to(q.dtype)
        of_keys = torch.einsum("htn,thd->nhd", d_scores, q[at_q].to(kind)) * scale
        of_values = torch.einsum("htn,thd->nhd", weights.to(v.dtype).to(kind), gradient)
        for out, each in ((dk, of_keys), (dv, of_values)):
            grouped = each.view(len(each), heads_k, heads // heads_k, q.shape[-1]).sum(2)
            out[at_k] = grouped.to(out.dtype)
    return dq, dk, dv
