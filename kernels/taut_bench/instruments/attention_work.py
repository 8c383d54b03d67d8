"""Bytes and FLOPs of attention, like those of :mod:`.op_work`.

A pair is a query and a key it sees, counted by head; keys that a causal mask or a window hides are
not counted. FLOPs a pair, beside the products (2·D each):

- forward: scores and output, two products; scale, difference, exponential, sum: 4
- backward: scores, gradient of the weights, and the gradients of values, keys and queries: five
  products; the weights again (scale, difference, exponential: 3), difference with delta and the
  product with the weight: 2
- backward, a query and head: delta, D products and sums

Which keys are seen depends on lengths: packed sequences and contexts lie in tensors, and where
these cannot be read (fake tensors) they are taken as long as ``max_q``, ``max_k`` or
``max_context`` allow.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from taut_bench.instruments.work import Arguments, Work, nbytes

_FORWARD, _BACKWARD = 4, 5


def _values(x: Tensor) -> list[int] | None:
    """Return a tensor's numbers, or None where there are none to read."""
    if isinstance(x, FakeTensor) or x.device.type == "meta":
        return None
    return [int(value) for value in x.tolist()]


def seen_pairs(count_q: int, count_k: int, causal: bool, window: int) -> int:
    """Return how many keys the queries of one sequence see, in sum.

    Args:
        count_q: queries; the last one stands at the last key.
        count_k: keys.
        causal: keys behind a query are hidden.
        window: keys a query sees at most, 0 for all.
    """
    if not causal:
        return count_q * count_k
    # A query at place p sees min(p + 1, window) keys, none where p < 0.
    highest, lowest = count_k, max(count_k - count_q + 1, 1)
    limit = window or count_k
    ramp_end = min(highest, limit)
    ramp = (lowest + ramp_end) * (ramp_end - lowest + 1) // 2 if ramp_end >= lowest else 0
    return ramp + limit * max(0, highest - max(lowest, limit + 1) + 1)


def _all_pairs(
    q: Tensor,
    k: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int,
) -> int:
    """Return pairs over all sequences, of one head."""
    if cu_q is None or cu_k is None:
        return q.shape[0] * seen_pairs(q.shape[1], k.shape[1], causal, window)
    at_q, at_k = _values(cu_q), _values(cu_k)
    if at_q is None or at_k is None:
        return (cu_q.shape[0] - 1) * seen_pairs(max_q, max_k, causal, window)
    return sum(
        seen_pairs(at_q[i + 1] - at_q[i], at_k[i + 1] - at_k[i], causal, window)
        for i in range(len(at_q) - 1)
    )


def _lse_bytes(q: Tensor) -> int:
    return q.numel() // q.shape[-1] * (8 if q.dtype is torch.float64 else 4)


def _attention(call: Arguments) -> Work:
    pairs = call.q.shape[-2] * _all_pairs(
        call.q, call.k, call.cu_q, call.cu_k, call.max_q, call.max_k, call.causal, call.window
    )
    read = nbytes(call.q, call.k, call.v, call.cu_q, call.cu_k)
    return Work(
        pairs * (4 * call.q.shape[-1] + _FORWARD), read, nbytes(call.q) + _lse_bytes(call.q)
    )


def _attention_backward(call: Arguments) -> Work:
    pairs = call.q.shape[-2] * _all_pairs(
        call.q, call.k, call.cu_q, call.cu_k, call.max_q, call.max_k, call.causal, call.window
    )
    flops = pairs * (10 * call.q.shape[-1] + _BACKWARD) + 2 * call.o.numel()
    return Work(
        flops,
        nbytes(call.do, call.q, call.k, call.v, call.o, call.lse, call.cu_q, call.cu_k),
        nbytes(call.q, call.k, call.v),
    )


def _looked_up(
    lengths: list[int], queries: int, window: int, k_cache: Tensor, block_table: Tensor
) -> tuple[int, int, int]:
    """Return bytes read of the keys, the values and the table of pages.

    With a window these are the keys that the first query sees, and those behind it.
    """
    reach = [min(length, window + queries - 1) if window else length for length in lengths]
    cached = sum(reach) * k_cache.shape[2] * k_cache.shape[3] * k_cache.element_size()
    pages = sum(-(-count // k_cache.shape[1]) for count in reach)
    return cached, cached, pages * block_table.element_size()


def _paged_decode(call: Arguments) -> Work:
    queries, heads, dim = call.q.shape[1:]
    lengths = _values(call.context_lens)
    if lengths is None:
        lengths = [call.max_context] * call.q.shape[0]
    pairs = sum(seen_pairs(queries, length, True, call.window) for length in lengths)
    looked_up = _looked_up(lengths, queries, call.window, call.k_cache, call.block_table)
    read = nbytes(call.q, call.context_lens, call.k_scale, call.v_scale) + sum(looked_up)
    return Work(pairs * heads * (4 * dim + _FORWARD), read, nbytes(call.q))


def _cache_write(call: Arguments) -> Work:
    """Count tokens that are written; a division an element where there is a scale."""
    places = _values(call.slots)
    tokens = call.slots.shape[0] if places is None else sum(place >= 0 for place in places)
    elements = tokens * call.k.shape[1] * call.k.shape[2]
    flops = elements * sum(scale is not None for scale in (call.k_scale, call.v_scale))
    read = 2 * elements * call.k.element_size() + nbytes(call.slots, call.k_scale, call.v_scale)
    return Work(flops, read, 2 * elements * call.k_cache.element_size())


ATTENTION_WORK: dict[str, Callable[[Arguments], Work]] = {
    "attention": _attention,
    "attention_backward": _attention_backward,
    "paged_decode": _paged_decode,
    "cache_write": _cache_write,
}
"""Name in `torch.ops.taut` → its work from a call's arguments."""


def paged_decode_tables(call: Arguments) -> dict[int, int]:
    """Return which of the op's tensors it looks rows up in, and the bytes of each that it reads."""
    lengths = _values(call.context_lens)
    if lengths is None:
        lengths = [call.max_context] * call.q.shape[0]
    looked_up = _looked_up(lengths, call.q.shape[1], call.window, call.k_cache, call.block_table)
    return dict(enumerate(looked_up, start=1))


def cache_write_tables(*_: object) -> dict[int, int]:
    """Return that of both caches nothing is read."""
    return {2: 0, 3: 0}
