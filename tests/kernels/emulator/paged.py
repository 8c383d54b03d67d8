"""Drawn calls of `taut::paged_decode`: pages in any order, holes, shared pages, any layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from taut_kernels.attention.decode import reference as decode_reference

HOLE = -(2**30)
"""Stands in the table where no page is: an address that nobody survives reading."""


@dataclass
class PagedCase:
    """Arguments of one call; ``scale`` is not 1/√D, so that a forgotten one shows.

    Attributes:
        q: [B, T, Hq, D].
        k_cache: [pages, page size, Hk, D].
        v_cache: likewise.
        block_table: [B, most pages] int32.
        context_lens: [B] int32.
        k_scale: fp32, one element or [Hk]; None for 16-bit caches.
        v_scale: likewise.
        max_context: the longest context.
        window: keys a query sees, 0 for all.
        scale: factor of the scores.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    max_context: int
    window: int
    scale: float

    def settings(self, arrivals: torch.Tensor | None = None) -> tuple[Any, ...]:
        """Return the op's arguments behind queries and caches."""
        scales = (self.k_scale, self.v_scale, arrivals)
        rest = (self.max_context, self.window, self.scale)
        return (self.block_table, self.context_lens, *scales, *rest)

    def reference(self) -> torch.Tensor:
        """Return the specification's result."""
        return decode_reference.paged_decode_ref(
            self.q, self.k_cache, self.v_cache, *self.settings()
        )

    def gold(self) -> torch.Tensor:
        """Return the result in fp64."""
        return decode_reference.paged_decode_ref(
            self.q.double(), self.k_cache, self.v_cache, *self.settings()
        )


def _elements(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int8:
        return (values * 40).round().clamp(-128, 127).to(dtype)
    return values.to(dtype)


def _laid_out(cache: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same elements with other strides, what lies between them not a number."""
    if layout == "heads first":
        return cache.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "gap":
        wide = cache.new_empty((*cache.shape[:3], cache.shape[3] + 16))
        wide.view(torch.uint8).fill_(0xFF)
        wide[..., : cache.shape[3]] = cache
        return wide[..., : cache.shape[3]]
    return cache


def make_case(
    contexts: list[int],
    heads: int,
    heads_k: int,
    dim: int,
    page: int,
    dtype: torch.dtype,
    *,
    queries: int = 1,
    window: int = 0,
    layout: str = "",
    by_head: bool = False,
    k_scale: float = 0.7,
    q_dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    seed: int = 0,
) -> PagedCase:
    """Draw a call. The first two sequences share their first page; 8-bit caches have scales.

    Elements behind a sequence's end, and pages nobody has, are not numbers (or the least int8).

    Args:
        contexts: keys of each sequence.
        heads: query heads.
        heads_k: key heads.
        dim: elements of a head.
        page: page size.
        dtype: of the caches.
        queries: of a sequence.
        window: keys a query sees, 0 for all.
        layout: "" for NHD, "heads first", "interleaved" (keys and values in one tensor), "gap"
            (elements between heads that belong to nobody) or "apart" (values "heads first").
        by_head: a scale each key head instead of one.
        k_scale: order of the keys' scale.
        q_dtype: of the queries.
        device: where to put it all.
        seed: of the generator; equal seeds give equal cases on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    most = -(-max(contexts) // page) + 2
    table = torch.full((len(contexts), most), HOLE, dtype=torch.int32)
    used = [-(-count // page) for count in contexts]
    free = torch.randperm(sum(used) + 3, generator=generator).int()
    start = 0
    for number, count in enumerate(used):
        table[number, :count] = free[start : start + count]
        start += count
    if len(contexts) > 1 and min(contexts[:2]) >= page:
        table[1, 0] = table[0, 0]
    caches = []
    for _ in range(2):
        values = torch.randn(len(free), page, heads_k, dim, generator=generator)
        cache = _elements(values, dtype)
        real = torch.zeros(len(free), page, dtype=torch.bool)
        for number, context in enumerate(contexts):
            for at in range(used[number]):
                real[table[number, at].long(), : context - at * page] = True
        cache.view(torch.uint8)[~real] = 0x80 if dtype == torch.int8 else 0xFF
        caches.append(cache)
    if layout == "interleaved":
        both = torch.stack(caches, dim=1)
        caches = [both[:, 0], both[:, 1]]
    else:
        of_keys = "" if layout == "apart" else layout
        of_values = "heads first" if layout == "apart" else layout
        caches = [_laid_out(caches[0], of_keys), _laid_out(caches[1], of_values)]
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if dtype.itemsize == 1:
        count = heads_k if by_head else 1
        base = 1 / 40 if dtype == torch.int8 else 1.0
        drawn = torch.rand(2, count, generator=generator) + 0.5
        scales = ((drawn[0] * base * k_scale).to(device), (drawn[1] * base * 1.3).to(device))
    q = torch.randn(len(contexts), queries, heads, dim, generator=generator).to(q_dtype)
    return PagedCase(
        q.to(device),
        _moved(caches[0], device),
        _moved(caches[1], device),
        table.to(device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        *scales,
        max(contexts),
        window,
        0.8 * dim**-0.5,
    )


def _moved(cache: torch.Tensor, device: str) -> torch.Tensor:
    """Move a view with its strides."""
    if device == "cpu":
        return cache
    moved = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype, device=device)
    moved.copy_(cache)
    return moved
