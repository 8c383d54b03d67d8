"""Tiles for more than 8 tokens on a shape nobody measured, on cards with `wgmma`.

Candidates are tiles that won on measured shapes, from 32 tokens on mostly fed by TMA, with K split
in several ways; the model of :mod:`taut_kernels.tiles_w4a16_cost` picks the fastest, dense products
included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, TypeVar

from taut_kernels.tiles_decode_ring import RingTile, token_tiles
from taut_kernels.tiles_w4a16_cost import (
    MULTIPROCESSORS,
    Cost,
    Cut,
    dense_estimate,
    estimate,
    fastest,
)
from taut_kernels.tiles_wgmma_ring import WgmmaRingTile
from taut_kernels.tiles_wgmma_tile import WgmmaTile

Fused = RingTile | WgmmaTile | WgmmaRingTile
Candidate = tuple[Fused, Cost]
Kind = TypeVar("Kind", RingTile, WgmmaTile, WgmmaRingTile)
LEAST_K = 512
"""Shorter rows than a ring is deep are left to the plain rule."""
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
        False,
        registers,
        parts=2,
        running=2,
        tma=True,
    )


_RINGS: tuple[Candidate, ...] = (
    (RingTile(2, 4, 1, 2, 1, 4, registers=128), Cost(4, 0.087, 0.246)),
    (RingTile(2, 4, 1, 4, 1, 4, registers=128), Cost(2, 0.078, 0.178)),
    (RingTile(1, 8, 1, 2, 1, 4, registers=96), Cost(2, 0.061, 0.203)),
    (RingTile(1, 4, 1, 2, 1, 6, registers=96), Cost(4, 0.041, 0.186)),
    (RingTile(1, 4, 1, 4, 1, 4, registers=96), Cost(3, 0.035, 0.149)),
)
_32_TOKENS: tuple[Candidate, ...] = (
    (_fed(32, 1, 1, 2, 5, 80), Cost(3, 0.077, 0.063)),
    (_fed(32, 1, 1, 4, 4, 128), Cost(2, 0.071, 0.059)),
    (_fed(32, 1, 1, 4, 7, 248), Cost(1, 0.108, 0.032)),
    (_fed(32, 2, 1, 4, 3, 128), Cost(2, 0.131, 0.115)),
    (WgmmaRingTile(32, 1, 1, 4, 1, 4, False), Cost(2, 0.025, 0.195)),
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
    WgmmaRingTile(192, 2, 2, 1, 1, 6, False, 168, parts=4, running=1, tma=True),
    Cost(1, 0.930, 0.060),
)
_192X256_FED_LONG = (_192X256_FED[0], Cost(1, 1.050, 0.100))
"""In several rounds at the card's power limit."""


def _long(block_m: int, stages: int, shared: float, own: float) -> Candidate:
    tile = WgmmaRingTile(block_m, 1, 2, 1, 1, stages, False, 168, parts=4, running=2, tma=True)
    return tile, Cost(1, shared, own)


_288X128_FED = _long(288, 5, 0.545, 0.240)
_320X128_FED = _long(320, 5, 0.625, 0.250)
_384X128_FED = _long(384, 4, 0.750, 0.290)
_256X64_FED = (_fed(256, 1, 1, 2, 3, 248), Cost(1, 0.340, 0.021))
_256X128_FED = (_fed(256, 1, 2, 2, 3, 168), Cost(1, 0.611, 0.091))
_64X64_LONG = (
    WgmmaRingTile(64, 1, 1, 4, 1, 5, True, parts=4, running=3),
    Cost(1, 0.072, 0.094),
)
_128X64 = (
    WgmmaRingTile(128, 1, 1, 2, 1, 3, True, parts=2, running=2),
    Cost(2, 0.092, 0.255),
)
_256X128: tuple[WgmmaTile, Cost] = (
    WgmmaTile(256, 1, 8, 1, 1, 3, reordered=True, early_wait=True),
    Cost(1, 0.506, 0.229),
)
_256X128_RING = (
    WgmmaRingTile(256, 1, 2, 1, 1, 6, True, parts=4, running=3),
    Cost(1, 0.581, 0.162),
)
CANDIDATES: dict[int, tuple[Candidate, ...]] = {
    16: _RINGS,
    32: _32_TOKENS,
    64: (*_64_TOKENS, _64X64_LONG),
    128: (_128X64_FED, _128X64_FED_ALONE, _128X128_FED, _128X256_FED, _64X64_LONG),
    192: (
        _128X64_FED_ALONE, _128X256_FED, _192X128_FED, _192X256_FED, _256X64_FED, _256X128_FED,
        _128X64,
    ),
    256: (_128X64_FED_ALONE, _128X256_FED, _256X64_FED, _256X128_FED, _128X64),
    384: (
        _128X64_FED, _128X64_FED_ALONE, _128X128_FED, _128X256_FED, _192X128_FED, _192X256_FED,
        _128X64,
    ),
    512: (_128X64_FED_ALONE, _256X64_FED, _256X128_FED, _256X128_RING, _128X64),
    768: (
        _128X64_FED_ALONE, _192X128_FED, _192X256_FED, _256X64_FED, _256X128_FED, _384X128_FED,
        _128X64,
    ),
    1024: (_256X64_FED, _256X128_FED, _128X64),
    1152: (
        _128X128_FED, _128X256_FED, _256X128_FED, _288X128_FED, _384X128_FED, _256X128,
    ),
    1280: (
        _128X128_FED, _128X256_FED, _256X128_FED, _320X128_FED, _256X128,
    ),
    1344: (
        _128X128_FED, _128X256_FED, _192X256_FED_LONG, _256X128_FED, _288X128_FED, _384X128_FED,
        _256X128,
    ),
    1408: (
        _128X128_FED, _128X256_FED, _256X128_FED, _288X128_FED, _384X128_FED, _256X128,
    ),
    1536: (
        _128X128_FED, _128X256_FED, _256X128_FED, _384X128_FED, _256X128,
    ),
    1664: (
        _128X128_FED, _128X256_FED, _256X128_FED, _288X128_FED, _256X128,
    ),
    2048: (_256X64_FED, _256X128_FED, _256X128),
}  # fmt: skip
"""By the tables' buckets; the last of each takes layers narrower than a TMA block.

256 tokens x 64 features, fed, is left out at 384 and 1664, which are no whole blocks of 256: there
it was timed only while partly full blocks took up to 2.6 times as long (README, "Fed by TMA").
"""
_SUMMED = (_128X64[0], _256X128_RING[0])
"""Their splits are added by a launch of their own."""
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


def rule(N: int, K: int, tokens: int) -> Fused | Literal["dense"]:
    """Choose for a shape nobody measured.

    Args:
        N: output features.
        K: input features, at least :data:`LEAST_K`.
        tokens: the most that the choice is for, one of the tables' buckets.

    Returns:
        The tile, or the word.
    """
    Ms = _TYPICAL.get(tokens, (tokens,))
    choices: list[tuple[float, Fused | Literal["dense"]]] = []
    for candidate in CANDIDATES[tokens]:
        for tile, cost in _cuts(candidate, N, K, tokens):
            choices.append((sum(_us(tile, cost, N, K, M) / M for M in Ms), tile))
    if tokens >= _DENSE_TOKENS:
        choices.append((sum(dense_estimate(N, K, M) / M for M in Ms), "dense"))
    found = fastest(choices)
    assert found is not None  # whole K always fits
    return found


def every_tile(kind: type[Kind]) -> list[Kind]:
    """Return the tiles of one kind that the rule may choose, K whole, in two and in most parts."""
    tiles = [tile for some in CANDIDATES.values() for tile, _ in some]
    split = [tile for tile in tiles if not isinstance(tile, WgmmaTile) and _most_splits(tile) > 1]
    tiles += [_in_splits(tile, 2) for tile in split]
    tiles += [_in_splits(tile, _most_splits(tile)) for tile in split if _fed_by_tma(tile)]
    return list(dict.fromkeys(tile for tile in tiles if isinstance(tile, kind)))


def _most_splits(tile: Fused) -> int:
    return _FEWER_SPLITS.get(tile, _SPLITS) if isinstance(tile, WgmmaRingTile) else _SPLITS


def _in_splits(tile: Fused, splits: int) -> Fused:
    if isinstance(tile, WgmmaRingTile):
        return replace(tile, split_k=splits, summed=tile in _SUMMED)
    return replace(tile, split_k=splits)


def _cuts(candidate: Candidate, N: int, K: int, tokens: int) -> Iterator[Candidate]:
    """Yield a candidate with K whole and split in every way that fits, if the shape fits it."""
    tile, cost = candidate
    if isinstance(tile, WgmmaRingTile) and tile.why_not(N, tokens):
        return
    yield tile, cost
    if isinstance(tile, WgmmaTile):
        return  # a split takes it registers, and one of two programs with them
    step, blocks = tile.chunks_per_step, 1
    if isinstance(tile, RingTile):
        step *= tile.k_warps
    else:
        blocks = -(-tokens // tile.block_m)
    programs = -(-N // tile.rows) * blocks
    if tile not in _SUMMED and programs > N // 16:
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
        steps = max(4, 2 * -(-chunks // (2 * a_step * tile.k_warps * tile.split_k)))
        return Cut(programs, tile.split_k, steps * a_step, 32 * tile.rows * token_tiles(M))
    a_step = tile.chunks_per_step
    if isinstance(tile, WgmmaTile) and chunks % 2:
        a_step = 1
    return Cut(
        programs * -(-M // tile.block_m),
        tile.split_k,
        -(-chunks // (a_step * tile.split_k)) * a_step,
        4 * tile.rows * tile.block_m,
        4 * M * K if tile.reordered else 0,
        isinstance(tile, WgmmaRingTile) and tile.summed,
    )
