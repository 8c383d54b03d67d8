"""Whether an 8-bit product of ours is the faster one, where the table of tiles does not say.

Tiles can be lent (:data:`taut_kernels.launch.tile_tables.TWINS`), verdicts cannot: with other
memory the same tile may lose (an H100 had the H200's until it got a table of its own). And
block-wise FP8 has its verdicts here on every card: DeepGEMM, vLLM's choice, does not run in the
tuner, and starts early, so that only behind the quantisation is its time the one a layer sees.

A row of the table ``scaled_mm_measured`` (:mod:`taut_kernels.launch.tile_tables`) is of one
product: ``M`` are numbers of tokens, ``us`` the times of ours, ``vllm_us`` those of vLLM's.
A row may also have ``"layer": {"M": […], "us": […], "vllm_us": […]}``: µs of a whole decoder layer
whose kernels start early, with ours and with vLLM's in this product. There it decides for the
numbers of tokens it names: an early start gains more than a kernel alone may lose.

`tuning.measured_scaled_mm_table` writes one from benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Set
from functools import cache

from taut_kernels.launch.tile_tables import Reader, Row

OPS = ("w8a8_gemm", "fp8_gemm", "fp8_block")
_FIGURES = {"M", "us", "vllm_us"}
Product = tuple[str, int, int]
"""op, N, K."""
Ratios = dict[int, float]
"""Tokens → vLLM's time ÷ ours."""


def _ratios(figures: Row) -> Ratios:
    """Return what a row's or a layer's figures say."""
    lengths = {len(figures.get(key, ())) for key in _FIGURES}
    if len(lengths) > 1 or 0 in lengths:
        raise ValueError("M, us and vllm_us must be of one length, at least 1")
    tokens = figures["M"]
    if len(set(tokens)) < len(tokens) or not all(type(M) is int and M > 0 for M in tokens):
        raise ValueError(f"M must be different numbers of tokens, got {tokens}")
    if not all(math.isfinite(us) and us > 0 for us in (*figures["us"], *figures["vllm_us"])):
        raise ValueError("times must be positive")
    times = zip(tokens, figures["us"], figures["vllm_us"], strict=True)
    return {M: theirs / ours for M, ours, theirs in times}


def _entry(row: Row) -> tuple[Product, tuple[Ratios, Ratios]]:
    """Return a product and its ratios: of calls alone, and of whole layers, as far as timed."""
    if row["op"] not in OPS:
        raise ValueError(f"op must be one of {OPS}")
    layer = row.get("layer")
    if layer is not None and (unknown := set(layer) - _FIGURES):
        raise ValueError(f"layer: unknown {sorted(unknown)}")
    in_layer = {} if layer is None else _ratios(layer)
    return (row["op"], row["N"], row["K"]), (_ratios(row), in_layer)


_READER = Reader(
    name="scaled_mm_measured",
    fields=frozenset({"op", "N", "K"} | _FIGURES),
    optional=frozenset({"layer"}),
    entry=_entry,
)
parse, tables = _READER.parse, cache(_READER.tables)


def products(gpu: str | None) -> Set[Product]:
    """Return what was measured on a card.

    Args:
        gpu: card name, None outside CUDA.
    """
    table = tables().get(gpu or "")
    return table.choices.keys() if table else frozenset()


def wins(
    gpu: str, op: str, N: int, K: int, first: int, last: int | None, *, in_layer: bool = False
) -> bool:
    """Say whether ours was at least as fast for a range of tokens.

    At all numbers of tokens measured in the range; where none was, at the nearest on both sides. In
    a layer those at which whole layers were timed decide, where there are some in the range.

    Args:
        gpu: card name.
        op: one of :data:`OPS`.
        N: output features.
        K: input features.
        first: fewest tokens.
        last: most tokens, None without a bound.
        in_layer: between kernels of ours that start early.

    Returns:
        False where nobody measured the product on the card.
    """
    if (table := tables().get(gpu)) is None:
        return False
    ratios, of_layers = table.choices.get((op, N, K), ({}, {}))
    if in_layer and (within := _inside(of_layers, first, last)):
        return all(of_layers[M] >= 1 for M in within)
    decide = _inside(ratios, first, last) or _beside(ratios, first)
    return bool(decide) and all(ratios[M] >= 1 for M in decide)


def _inside(ratios: Ratios, first: int, last: int | None) -> list[int]:
    """Return the numbers of tokens measured in a range."""
    return [tokens for tokens in ratios if tokens >= first and (last is None or tokens <= last)]


def _beside(ratios: Ratios, first: int) -> list[int]:
    """Return the nearest numbers of tokens measured around a range in which none was."""
    below = sorted(tokens for tokens in ratios if tokens < first)
    above = sorted(tokens for tokens in ratios if tokens > first)
    return [*below[-1:], *above[:1]]
