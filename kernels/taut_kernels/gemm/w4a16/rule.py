"""Tiles for more than 8 tokens on a shape nobody measured, on cards with `wgmma`.

Candidates are tiles that won on measured shapes, from 32 tokens on mostly fed by TMA, with K split
in several ways; the model of :mod:`.cost` picks the fastest, dense products
included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, TypeVar

from taut_kernels.gemm.w4a16.cost import (
    MULTIPROCESSORS,
    Cost,
    Cut,
    by_estimate,
    dense_estimate,
    estimate,
)
from taut_kernels.gemm.w4a16.decode_ring_tile import RingTile, token_tiles
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile

Fused = RingTile | WgmmaRingTile
Candidate = tuple[Fused, Cost]
Kind = TypeVar("Kind", RingTile, WgmmaRingTile)
LEAST_K = 512
"""Shorter rows than a ring is deep are left to the plain rule."""
LEAST_N = 64
"""Layers narrower than a block of TMA likewise."""
_SPLITS = 8
"""Most programs along K."""
_DENSE_TOKENS = 1024
"""From so many on, dequantising may pay."""
_FEWEST_STEPS = 4


def _fed(
    block_m: int, group_tiles: int, warp_groups: int, per_step: int, stages: int, registers: int
) -> WgmmaRingTile:
    return WgmmaRingTile(
        block_m,
        group_tiles,
        warp_groups,
        per_step,
        1,
        stages,
        registers,
        parts=2,
        running=2,
        tma=True,
    )


_RINGS: tuple[Candidate, ...] = (
    (RingTile(2, 4, 2, 1, 4, registers=128), Cost(4, 0.087, 0.246)),
    (RingTile(2, 4, 4, 1, 4, registers=128), Cost(2, 0.078, 0.178)),
    (RingTile(1, 8, 2, 1, 4, registers=96), Cost(2, 0.061, 0.203)),
    (RingTile(1, 4, 2, 1, 6, registers=96), Cost(4, 0.041, 0.186)),
    (RingTile(1, 4, 4, 1, 4, registers=96), Cost(3, 0.035, 0.149)),
)
_32_TOKENS: tuple[Candidate, ...] = (
    (_fed(32, 1, 1, 2, 5, 80), Cost(3, 0.077, 0.063)),
    (_fed(32, 1, 1, 4, 4, 128), Cost(2, 0.071, 0.059)),
    (_fed(32, 1, 1, 4, 7, 248), Cost(1, 0.108, 0.032)),
    (_fed(32, 2, 1, 4, 3, 128), Cost(2, 0.131, 0.115)),
    (WgmmaRingTile(32, 1, 1, 4, 1, 4), Cost(2, 0.025, 0.195)),
)
_64_TOKENS: tuple[Candidate, ...] = (
    (_fed(64, 1, 1, 2, 3, 80), Cost(3, 0.088, 0.099)),
    (_fed(64, 1, 1, 2, 5, 128), Cost(2, 0.052, 0.147)),
    (_fed(64, 1, 1, 4, 5, 248), Cost(1, 0.136, 0.022)),
    (_fed(64, 1, 2, 2, 4, 80), Cost(2, 0.149, 0.173)),
)
_128X64_FED = (_fed(128, 1, 1, 2, 3, 128), Cost(2, 0.083, 0.200))
_128X64_FED_ALONE = (_fed(128, 1, 1, 4, 3, 248), Cost(1, 0.192, 0.010))
_128X128_FED = (_fed(128, 1, 2, 2, 5, 168), Cost(1, 0.346, 0.023))
_128X256_FED = (_fed(128, 2, 2, 2, 4, 168), Cost(1, 0.629, 0.105))
_192X128_FED = (_fed(192, 1, 2, 2, 3, 168), Cost(1, 0.470, 0.020))
_192X256_FED = (
    WgmmaRingTile(192, 2, 2, 1, 1, 6, 168, parts=4, running=1, tma=True),
    Cost(1, 0.930, 0.060),
)
_192X256_FED_LONG = (_192X256_FED[0], Cost(1, 1.050, 0.100))
"""In several rounds at the card's power limit."""


def _long(block_m: int, stages: int, shared: float, own: float) -> Candidate:
    tile = WgmmaRingTile(block_m, 1, 2, 1, 1, stages, 168, parts=4, running=2, tma=True)
    return tile, Cost(1, shared, own)


_288X128_FED = _long(288, 5, 0.545, 0.240)
_320X128_FED = _long(320, 5, 0.625, 0.250)
_384X128_FED = _long(384, 4, 0.750, 0.290)
_256X64_FED = (_fed(256, 1, 1, 2, 3, 248), Cost(1, 0.340, 0.021))
_256X128_FED = (_fed(256, 1, 2, 2, 3, 168), Cost(1, 0.611, 0.091))
CANDIDATES: dict[int, tuple[Candidate, ...]] = {
    16: _RINGS,
    32: _32_TOKENS,
    64: _64_TOKENS,
    128: (_128X64_FED, _128X64_FED_ALONE, _128X128_FED, _128X256_FED),
    192: (
        _128X64_FED_ALONE, _128X256_FED, _192X128_FED, _192X256_FED, _256X64_FED, _256X128_FED,
    ),
    256: (_128X64_FED_ALONE, _128X256_FED, _256X64_FED, _256X128_FED),
    384: (
        _128X64_FED, _128X64_FED_ALONE, _128X128_FED, _128X256_FED, _192X128_FED, _192X256_FED,
    ),
    512: (_128X64_FED_ALONE, _256X64_FED, _256X128_FED),
    768: (
        _128X64_FED_ALONE, _192X128_FED, _192X256_FED, _256X64_FED, _256X128_FED, _384X128_FED,
    ),
    1024: (_256X64_FED, _256X128_FED),
    1152: (
        _128X128_FED, _128X256_FED, _256X128_FED, _288X128_FED, _384X128_FED
    ),
    1280: (
        _128X128_FED, _128X256_FED, _256X128_FED, _320X128_FED
    ),
    1344: (
        _128X128_FED, _128X256_FED, _192X256_FED_LONG, _256X128_FED, _288X128_FED, _384X128_FED,
    ),
    1408: (
        _128X128_FED, _128X256_FED, _256X128_FED, _288X128_FED, _384X128_FED
    ),
    1536: (
        _128X128_FED, _128X256_FED, _256X128_FED, _384X128_FED
    ),
    1664: (
        _128X128_FED, _128X256_FED, _256X128_FED, _288X128_FED
    ),
    2048: (_256X64_FED, _256X128_FED),
}  # fmt: skip
"""By the tables' buckets.

256 tokens x 64 features, fed, is left out at 384 and 1664, which are no whole blocks of 256: there
it was timed only while partly full blocks took up to 2.6 times as long (README, "Fed by TMA").
"""
_FEWER_SPLITS = {
    _128X64_FED_ALONE[0]: 6,
    _128X128_FED[0]: 6,
    _128X256_FED[0]: 5,
    _256X64_FED[0]: 3,
    _256X128_FED[0]: 2,
    _192X128_FED[0]: 1,
    _192X256_FED[0]: 1,
    _288X128_FED[0]: 1,
    _320X128_FED[0]: 1,
    _384X128_FED[0]: 1,
}
"""With more, adding them spills more than 32 bytes a thread under Triton 3.6 or 3.9; uneven blocks
take none."""
_TYPICAL = {768: (640, 768), 1024: (896, 1024)}
"""Numbers of tokens that count as much as each other, where a bucket's largest is not all: between
two buckets lie one number of blocks of 256 tokens but two of blocks of 128."""


def ranked(N: int, K: int, tokens: int) -> list[Fused | Literal["dense"]]:
    """Return what a shape may run on, by the model fastest first.

    Args:
        N: output features.
        K: input features, at least :data:`LEAST_K`, as N is :data:`LEAST_N`.
        tokens: the most that the choice is for, one of the tables' buckets.

    Returns:
        Tiles and the word, at least one.
    """
    Ms = _TYPICAL.get(tokens, (tokens,))
    choices: list[tuple[float, Fused | Literal["dense"]]] = []
    for candidate in CANDIDATES[tokens]:
        for tile, cost in _cuts(candidate, N, K, tokens):
            choices.append((sum(_us(tile, cost, N, K, M) / M for M in Ms), tile))
    if tokens >= _DENSE_TOKENS:
        choices.append((sum(dense_estimate(N, K, M) / M for M in Ms), "dense"))
    return by_estimate(choices)


def rule(N: int, K: int, tokens: int) -> Fused | Literal["dense"]:
    """Choose for a shape nobody measured: the first of :func:`ranked`.

    Args:
        N: output features.
        K: input features, at least :data:`LEAST_K`, as N is :data:`LEAST_N`.
        tokens: the most that the choice is for, one of the tables' buckets.

    Returns:
        The tile, or the word.
    """
    return ranked(N, K, tokens)[0]


def every_tile(kind: type[Kind]) -> list[Kind]:
    """Return the tiles of one kind that the rule may choose, K whole, in two and in most parts."""
    tiles = [tile for some in CANDIDATES.values() for tile, _ in some]
    split = [tile for tile in tiles if _most_splits(tile) > 1]
    tiles += [_in_splits(tile, 2) for tile in split]
    tiles += [_in_splits(tile, _most_splits(tile)) for tile in split if _fed_by_tma(tile)]
    return list(dict.fromkeys(tile for tile in tiles if isinstance(tile, kind)))


def _most_splits(tile: Fused) -> int:
    return _FEWER_SPLITS.get(tile, _SPLITS) if isinstance(tile, WgmmaRingTile) else _SPLITS


def _in_splits(tile: Fused, splits: int) -> Fused:
    return replace(tile, split_k=splits)


def _cuts(candidate: Candidate, N: int, K: int, tokens: int) -> Iterator[Candidate]:
    """Yield a candidate with K whole and split in every way that fits, if the shape fits it."""
    tile, cost = candidate
    if isinstance(tile, WgmmaRingTile) and tile.why_not(N, tokens):
        return
    yield tile, cost
    step, blocks = tile.chunks_per_step, 1
    if isinstance(tile, WgmmaRingTile):
        blocks = -(-tokens // tile.block_m)
    programs = -(-N // tile.rows) * blocks
    if programs > N // 16:
        return  # more meeting places than a layer counts
    for splits in range(2, _most_splits(tile) + 1):
        if K // 64 // (step * splits) < _FEWEST_STEPS:
            return
        if _fed_by_tma(tile) and programs * splits > MULTIPROCESSORS * cost.resident:
            return  # no run has timed a split of these in more than one round
        yield _in_splits(tile, splits), cost


def _fed_by_tma(tile: Fused) -> bool:
    return isinstance(tile, WgmmaRingTile) and tile.tma


def _us(tile: Fused, cost: Cost, N: int, K: int, M: int) -> float:
    return estimate(cut(tile, N, K, M), cost)


def cut(tile: Fused, N: int, K: int, M: int) -> Cut:
    """Return what a tile makes of a shape.

    Args:
        tile: how to cut the work.
        N: output features.
        K: input features.
        M: tokens.
    """
    chunks, programs = K // 64, -(-N // tile.rows)
    if isinstance(tile, RingTile):
        a_step = tile.chunks_per_step
        steps = max(4, 2 * -(-chunks // (2 * a_step * tile.split_k)))
        return Cut(programs, tile.split_k, steps * a_step, 32 * tile.rows * token_tiles(M))
    a_step = tile.chunks_per_step
    return Cut(
        programs * -(-M // tile.block_m),
        tile.split_k,
        -(-chunks // (a_step * tile.split_k)) * a_step,
        4 * tile.rows * tile.block_m,
    )
