"""Which rows make a table serve what was decided all over its buckets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16.lookup import BUCKETS, Choice, Choices
from taut_kernels.gemm.w4a16.pair_tile import WavesTile
from taut_kernels.gemm.w4a16.weight_format import WeightFormat

Tile = TypeVar("Tile")


@dataclass(frozen=True)
class Result(Generic[Tile]):
    """One timed choice; ``us`` is microseconds a call, ``tile`` None for the dense kernel."""

    shape: str
    N: int
    K: int
    M: int
    us: float
    tile: Tile


Place = tuple[int, int, int]
"""N, K and a bucket's index."""


def changed(
    decided: Mapping[Place, tuple[Choice, Choice]], shipped: Choices, weights: WeightFormat
) -> dict[Place, Choice]:
    """Return the rows that the shipped table lacks.

    A bucket that was cut out of a wider one and has no row takes the wider's. So a product's widest
    bucket comes first; where its row changes, what a narrower one had becomes a row of its own.

    Args:
        decided: what serves a place now, by a row or the rule, and what should.
        shipped: a card's rows.
        weights: the format of what was decided.
    """
    table = dict(shipped)
    rows: dict[Place, Choice] = {}
    for N, K, bucket in sorted(decided, key=lambda place: (*place[:2], -place[2])):
        ships, best = decided[N, K, bucket]
        best = _as_row(best, N, bucket)
        serves = tiles_wgmma.served(table, N, K, bucket, weights)
        if best != _as_row(ships if serves is None else serves, N, bucket):
            rows[N, K, bucket] = table[N, K, bucket, weights] = best
    return rows


def _as_row(choice: Choice, N: int, bucket: int) -> Choice:
    """Return the head alone of two tiles from a wider bucket that takes all features at its end.

    No table takes such a pair.
    """
    if isinstance(choice, WavesTile) and bucket < len(BUCKETS):
        return choice.head if choice.head_rows(BUCKETS[bucket], N) == N else choice
    return choice
