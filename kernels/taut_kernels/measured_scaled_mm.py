"""Whether an 8-bit product of ours is the faster one, on a card that takes another card's tiles.

Tiles can be lent (:data:`taut_kernels._tile_tables.TWINS`), verdicts cannot: with other memory the
same tile may lose. A table is ``tiles/scaled_mm_measured-<card>.json``::

    {"gpu": "<torch.cuda.get_device_name>", "source": "<command, date, versions>",
     "rows": [{"op": "w8a8_gemm" | "fp8_gemm", "N": …, "K": …, "M": [tokens, …],
               "us": [µs per call, …], "vllm_us": [µs of the kernel vLLM runs there, …]}, …]}

`taut_kernels.bench.measured_scaled_mm_table` writes one from benchmarks.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Set
from dataclasses import dataclass
from functools import cache
from typing import Any

from taut_kernels import _tile_tables

OPS = ("w8a8_gemm", "fp8_gemm")
_ROW_FIELDS = {"op", "N", "K", "M", "us", "vllm_us"}
Product = tuple[str, int, int]
"""op, N, K."""


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """One card's products: tokens → vLLM's time ÷ ours."""

    gpu: str
    ratios: dict[Product, dict[int, float]]


def _why_not_judged(row: dict[str, Any]) -> str | None:
    """Say why a row's figures say nothing; None where they do."""
    tokens = row["M"]
    if not tokens or len({len(row[key]) for key in ("M", "us", "vllm_us")}) > 1:
        return "M, us and vllm_us must be of one length, at least 1"
    if len(set(tokens)) < len(tokens) or not all(type(M) is int and M > 0 for M in tokens):
        return f"M must be different numbers of tokens, got {tokens}"
    if not all(math.isfinite(us) and us > 0 for us in (*row["us"], *row["vllm_us"])):
        return "times must be positive"
    return None


def parse(text: str, where: str) -> MeasuredTable:
    """Read a table.

    Args:
        text: JSON in the form of the module's docstring.
        where: file name, for errors.

    Raises:
        ValueError: an unknown key, figures of different lengths or not positive, or a product
            named twice; names ``where``.
    """
    gpu, listed = _tile_tables.rows_of(text, where)
    found: dict[Product, dict[int, float]] = {}
    for row in listed:
        if set(row) != _ROW_FIELDS or row["op"] not in OPS:
            raise ValueError(f"{where}: a row needs exactly {sorted(_ROW_FIELDS)}, op one of {OPS}")
        product = (row["op"], row["N"], row["K"])
        if product in found:
            raise ValueError(f"{where}: {product} is there twice")
        if reason := _why_not_judged(row):
            raise ValueError(f"{where}: {product}: {reason}")
        times = zip(row["M"], row["us"], row["vllm_us"], strict=True)
        found[product] = {M: theirs / ours for M, ours, theirs in times}
    return MeasuredTable(gpu, found)


@cache
def tables() -> dict[str, MeasuredTable]:
    """Load every card's table, once a process."""
    return _tile_tables.load_all("scaled_mm_measured", parse)


def products(gpu: str | None) -> Set[Product]:
    """Return what was measured on a card.

    Args:
        gpu: card name, None outside CUDA.
    """
    table = tables().get(gpu or "")
    return table.ratios.keys() if table else frozenset()


def wins(gpu: str, op: str, N: int, K: int, first: int, last: int | None) -> bool:
    """Say whether ours was at least as fast for a range of tokens.

    At all numbers of tokens measured in the range; where none was, at the nearest on both sides.

    Args:
        gpu: card name.
        op: ``w8a8_gemm`` or ``fp8_gemm``.
        N: output features.
        K: input features.
        first: fewest tokens.
        last: most tokens, None without a bound.

    Returns:
        False where nobody measured the product on the card.
    """
    table = tables().get(gpu)
    ratios = table.ratios.get((op, N, K)) if table else None
    if not ratios:
        return False
    measured = sorted(ratios)
    start = bisect_left(measured, first)
    end = len(measured) if last is None else bisect_right(measured, last)
    if start == end:
        start, end = max(start - 1, 0), end + 1
    return all(ratios[M] >= 1 for M in measured[start:end])
