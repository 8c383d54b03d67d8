"""How long a W4A16 tile takes on a shape nobody measured: a model of few figures and two a tile.

A program works through chunks of 64 K indices. What a chunk takes is partly the card's (memory,
issue slots, tensor cores) and is shared by all multiprocessors, partly the program's own (waiting)
and comes again with every round of programs::

    start + chunks · (load · shared + rounds · own) + fill · (rounds - 1)
          + bringing activations into fragment order + adding splits

where the load, programs a multiprocessor, lies between the average and the busiest one's.

The figures, in microseconds, were fitted to some 3,000 runs on 20 shapes on one H200; those of
tiles fed by TMA to 620 later ones, the others held fixed (README, "Other models"). They need to
rank tiles, not to be right: other cards with `wgmma` are taken to rank them alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

MULTIPROCESSORS = 132
"""Of an H100 or H200 (SXM)."""
_START = 1.7
_FILL = 1.3
_UNEVEN = 0.6
"""Of what is shared, how much the busiest multiprocessor's programs count, not the average's."""
_MEET = (1.25, 1.1e5, 3.3e4)
"""The last of a tile's programs adds its splits: once, bytes a µs it reads, and that its
multiprocessor writes and reads of all its programs."""
_DENSE = (3.4, 3.2e6, 7.5e8)
"""Dequantising and cuBLAS: once, bytes and products a µs."""
Tile = TypeVar("Tile")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a tile takes.

    Attributes:
        resident: programs that fit a multiprocessor.
        shared: µs of a whole multiprocessor for one chunk of a program.
        own: µs a chunk for each round of programs.
    """

    resident: int
    shared: float
    own: float


@dataclass(frozen=True, slots=True)
class Cut:
    """A tile on a shape.

    Attributes:
        programs: along output features and tokens.
        splits: along K.
        chunks: a program's.
        sums: bytes of a program's partial sums.
    """

    programs: int
    splits: int
    chunks: int
    sums: int


def estimate(cut: Cut, cost: Cost) -> float:
    """Return how long a cut takes, in µs."""
    programs = cut.programs * cut.splits
    busiest = -(-programs // MULTIPROCESSORS)
    rounds = -(-busiest // cost.resident)
    us = _START + _FILL * (rounds - 1)
    load = (1 - _UNEVEN) * programs / MULTIPROCESSORS + _UNEVEN * busiest
    us += cut.chunks * (load * cost.shared + rounds * cost.own)
    if cut.splits == 1:
        return us
    return us + _MEET[0] + cut.sums * (cut.splits / _MEET[1] + busiest / _MEET[2])


def dense_estimate(N: int, K: int, M: int) -> float:
    """Return how long dequantising and cuBLAS take, in µs.

    Args:
        N: output features.
        K: input features.
        M: tokens.
    """
    bytes_moved = N * K // 2 + 2 * N * K
    return _DENSE[0] + bytes_moved / _DENSE[1] + 2 * M * N * K / _DENSE[2]


def by_estimate(estimates: Iterable[tuple[float, Tile]]) -> list[Tile]:
    """Return tiles in the order of their estimates, equals in that of their coming."""
    return [tile for _, tile in sorted(estimates, key=lambda pair: pair[0])]
