"""Attention by name, with inputs drawn for given sizes; prefill can run its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from taut_bench.instruments.errors import InstrumentError
from taut_kernels.attention.cache_arguments import check
from taut_kernels.attention.cache_write import op as cache_write
from taut_kernels.attention.decode import op as decode
from taut_kernels.attention.prefill import op as prefill

Sizes = Mapping[str, int]
_HEADS = {"Hq": 32, "Hk": 8, "D": 128}


def attention(q: Tensor, k: Tensor, v: Tensor, full: bool, window: int) -> Tensor:
    """Attend with :func:`taut_kernels.attention.prefill.op.attention`; returns o.

    Args:
        q: [B, Tq, Hq, D].
        k: [B, Tk, Hk, D].
        v: as ``k``.
        full: not causal.
        window: keys a query sees, 0 for all.
    """
    return prefill.attention(q, k, v, causal=not full, window=window or None)[0]


def prompts(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Draw q [B, M, Hq, D], k and v [B, M, Hk, D], leaves with gradient."""
    generator = torch.Generator().manual_seed(sizes["M"])

    def draw(heads: int) -> Tensor:
        shape = (sizes["B"], sizes["M"], heads, sizes["D"])
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    q, k, v = (draw(sizes[heads]) for heads in ("Hq", "Hk", "Hk"))
    return q, k, v, bool(sizes["full"]), sizes["window"]


def paged(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Draw B sequences of M cached tokens, in pages of ``page`` in no order."""
    if sizes["fp8"] and sizes["int8"]:
        raise InstrumentError("--shape fp8=1,int8=1: a cache is one of them")
    if sizes["Hq"] % sizes["Hk"]:
        raise InstrumentError(f"--shape Hq={sizes['Hq']}: not a multiple of Hk={sizes['Hk']}")
    generator = torch.Generator().manual_seed(sizes["M"])
    B, page, each = sizes["B"], sizes["page"], -(-sizes["M"] // sizes["page"])

    def cache() -> Tensor:
        values = torch.randn(B * each, page, sizes["Hk"], sizes["D"], generator=generator)
        if sizes["int8"]:
            return (values * 40).round().clamp(-128, 127).to(device, torch.int8)
        return values.to(device, torch.float8_e4m3fn if sizes["fp8"] else dtype)

    k_cache, v_cache = cache(), cache()
    q = torch.randn(B, sizes["T"], sizes["Hq"], sizes["D"], generator=generator)
    table = torch.randperm(B * each, generator=generator).int().view(B, each)
    lens = torch.full((B,), sizes["M"], dtype=torch.int32)
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    if sizes["fp8"] or sizes["int8"]:
        scale = torch.full((1,), 1 / 40 if sizes["int8"] else 1.0, device=device)
        scales = (scale, scale.clone())
    arrivals = decode.make_arrivals(B, sizes["Hq"], device, sizes["T"])
    settings = (sizes["M"], sizes["window"], sizes["D"] ** -0.5)
    on_device = (q.to(device, dtype), k_cache, v_cache, table.to(device), lens.to(device))
    check(*on_device)
    return (*on_device, *scales, arrivals, *settings)


def new_tokens(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Draw keys and values of M tokens, empty pages for them, and slots in no order."""
    generator = torch.Generator().manual_seed(sizes["M"])
    page, stored = sizes["page"], cache_write.FP8 if sizes["fp8"] else dtype
    pages = -(-sizes["M"] // page)
    k, v = (
        torch.randn(sizes["M"], sizes["Hk"], sizes["D"], generator=generator).to(device, dtype)
        for _ in range(2)
    )
    caches = (
        torch.empty(pages, page, sizes["Hk"], sizes["D"], dtype=stored, device=device)
        for _ in range(2)
    )
    slots = torch.randperm(pages * page, generator=generator)[: sizes["M"]].to(device)
    scales = (torch.full((1,), 0.5, device=device) if sizes["fp8"] else None for _ in range(2))
    return (k, v, *caches, slots, *scales)


CASES: dict[
    str,
    tuple[dict[str, int], Callable[[Sizes, torch.dtype, torch.device], tuple[Any, ...]]],
] = {
    "attention": ({"B": 1, "M": 1024, **_HEADS, "full": 0, "window": 0}, prompts),
    "paged_decode": (
        {"B": 8, "M": 4096, "T": 1, **_HEADS, "page": 16, "fp8": 0, "int8": 0, "window": 0},
        paged,
    ),
    "cache_write": ({"M": 1024, "Hk": 8, "D": 128, "page": 16, "fp8": 0}, new_tokens),
}
"""Name → sizes with their defaults, and what draws the inputs."""
CALLS: dict[str, Callable[..., Any]] = {"attention": attention}
"""Name → a function that can run its gradients; the op itself where there is none."""
