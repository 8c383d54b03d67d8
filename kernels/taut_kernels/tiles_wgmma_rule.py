"""Tiles for more than 8 tokens on a shape nobody measured, on cards with `wgmma`.

Candidates are tiles that won on measured shapes, with K split in several ways, and two of them for
one product where one alone would leave a wave of programs half empty; the model of
:mod:`taut_kernels.tiles_w4a16_cost` picks the fastest, dense products included.
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
    tail_estimate,
)
from taut_kernels.tiles_wgmma_ring import WgmmaRingTile
from taut_kernels.tiles_wgmma_tile import WgmmaTile
from taut_kernels.tiles_wgmma_waves import WavesTile

Fused = RingTile | WgmmaTile | WgmmaRingTile
Candidate = tuple[Fused, Cost]
Kind = TypeVar("Kind", RingTile, WgmmaTile, WgmmaRingTile)
LEAST_K = 512
"""Shorter rows than a ring is deep are left to the plain rule."""
_SPLITS = (1, 2, 3, 4, 5, 6, 7, 8)
_DENSE_TOKENS = 1024
"""From so many on, dequantising may pay."""
_FEWEST_STEPS = 4

_RINGS: tuple[Candidate, ...] = (
    (RingTile(2, 4, 1, 2, 1, 4, registers=128), Cost(4, 0.087, 0.246)),
    (RingTile(2, 4, 1, 4, 1, 4, registers=128), Cost(2, 0.078, 0.178)),
    (RingTile(1, 8, 1, 2, 1, 4, registers=96), Cost(2, 0.061, 0.203)),
    (RingTile(1, 4, 1, 2, 1, 6, registers=96), Cost(4, 0.041, 0.186)),
    (RingTile(1, 4, 1, 4, 1, 4, registers=96), Cost(3, 0.035, 0.149)),
)
_32_TOKENS: tuple[Candidate, ...] = (
    (WgmmaRingTile(32, 1, 1, 4, 1, 4, False), Cost(2, 0.025, 0.195)),
    (WgmmaRingTile(32, 1, 1, 2, 1, 5, False, 168, parts=2, running=2), Cost(3, 0.047, 0.211)),
    (WgmmaRingTile(32, 2, 1, 4, 1, 3, False, parts=4), Cost(2, 0.064, 0.283)),
    (WgmmaRingTile(32, 2, 1, 2, 1, 4, False, 168, parts=2, running=2), Cost(3, 0.095, 0.295)),
    (WgmmaRingTile(32, 1, 2, 4, 1, 3, False, 128), Cost(2, 0.105, 0.206)),
)
_64X64_LONG = (
    WgmmaRingTile(64, 1, 1, 4, 1, 5, True, parts=4, running=3),
    Cost(1, 0.072, 0.094),
)
_64X64 = (WgmmaRingTile(64, 1, 1, 2, 1, 5, True), Cost(2, 0.053, 0.178))
_64X128 = (
    WgmmaRingTile(64, 1, 2, 2, 1, 4, True, 128, parts=2, running=2),
    Cost(2, 0.139, 0.213),
)
_64X128_LONG = (
    WgmmaRingTile(64, 1, 2, 4, 1, 4, True, parts=2, running=2),
    Cost(1, 0.117, 0.156),
)
_128X64 = (
    WgmmaRingTile(128, 1, 1, 2, 1, 3, True, parts=2, running=2),
    Cost(2, 0.092, 0.255),
)
_128X128 = (
    WgmmaRingTile(128, 1, 2, 2, 1, 5, True, parts=2, running=2),
    Cost(1, 0.272, 0.144),
)
_128X256 = (
    WgmmaRingTile(128, 2, 2, 2, 1, 4, True, parts=2, running=2),
    Cost(1, 0.596, 0.230),
)
_256X128_RING = (
    WgmmaRingTile(256, 1, 2, 1, 1, 6, True, parts=4, running=3),
    Cost(1, 0.581, 0.162),
)
_128X128_PLAIN = (
    WgmmaTile(128, 1, 8, 2, 1, 3, reordered=True, early_wait=True),
    Cost(1, 0.305, 0.132),
)
_256X128 = (
    WgmmaTile(256, 1, 8, 1, 1, 3, reordered=True, early_wait=True),
    Cost(1, 0.506, 0.229),
)
CANDIDATES: dict[int, tuple[Candidate, ...]] = {
    16: _RINGS,
    32: _32_TOKENS,
    64: (_64X64_LONG, _64X128, _64X128_LONG),
    128: (_64X64_LONG, _64X64, _64X128, _128X128, _128X256),
    256: (_64X64, _128X64, _128X128, _256X128_RING, _256X128),
    512: (_128X64, _128X128_PLAIN, _256X128_RING, _256X128),
    1024: (_128X64, _128X128_PLAIN, _256X128_RING, _256X128),
    2048: (_256X128,),
}
"""By the largest number of tokens; a bucket of the tables that is not here takes the next one's."""
_SUMMED = (_128X64[0], _256X128_RING[0])
"""Their splits are added by a launch of their own."""
_HEADS = (_256X128_RING, _256X128)
_TAILS = (_128X64[0], replace(_128X64[0], split_k=2, summed=True))
_WAVES_TOKENS = (256, 1024)
_TYPICAL = {256: (192, 256), 1024: (768, 1024)}
"""Numbers of tokens that count as much as each other, where a bucket's largest is not all."""


def rule(N: int, K: int, tokens: int) -> Fused | WavesTile | Literal["dense"]:
    """Choose for a shape nobody measured.

    Args:
        N: output features.
        K: input features, at least :data:`LEAST_K`.
        tokens: the most that the choice is for, one of the tables' buckets.

    Returns:
        The tile, or the word.
    """
    Ms = _TYPICAL.get(tokens, (tokens,))
    choices: list[tuple[float, Fused | WavesTile | Literal["dense"]]] = []
    for candidate in CANDIDATES[next(most for most in CANDIDATES if most >= tokens)]:
        for tile, cost in _split(candidate, N, K, tokens):
            choices.append((sum(_us(tile, cost, N, K, M) / M for M in Ms), tile))
    if _WAVES_TOKENS[0] <= tokens <= _WAVES_TOKENS[1]:
        for waves, us in _two_tiles(N, K, tokens, Ms):
            choices.append((us, waves))
    if tokens >= _DENSE_TOKENS:
        choices.append((sum(dense_estimate(N, K, M) / M for M in Ms), "dense"))
    found = fastest(choices)
    assert found is not None  # whole K always fits
    return found


def every_tile(kind: type[Kind]) -> list[Kind]:
    """Return the tiles of one kind that the rule may choose, K whole and in two."""
    tiles = [tile for some in CANDIDATES.values() for tile, _ in some]
    tiles += [_in_splits(tile, 2) for tile in tiles if not isinstance(tile, WgmmaTile)]
    return list(dict.fromkeys(tile for tile in tiles if isinstance(tile, kind)))


def _in_splits(tile: Fused, splits: int) -> Fused:
    if isinstance(tile, WgmmaRingTile):
        return replace(tile, split_k=splits, summed=tile in _SUMMED)
    return replace(tile, split_k=splits)


def _split(candidate: Candidate, N: int, K: int, tokens: int) -> Iterator[Candidate]:
    """Yield a candidate with K whole and split in every way that fits."""
    tile, cost = candidate
    yield tile, cost
    if isinstance(tile, WgmmaTile):
        return  # a split takes it registers, and one of two programs with them
    step, blocks = tile.chunks_per_step, 1
    if isinstance(tile, RingTile):
        step *= tile.k_warps
    else:
        blocks = -(-tokens // tile.block_m)
    if tile not in _SUMMED and -(-N // tile.rows) * blocks > N // 16:
        return  # more meeting places than a layer counts
    for splits in _SPLITS[1:]:
        if K // 64 // (step * splits) < _FEWEST_STEPS:
            return
        yield _in_splits(tile, splits), cost


def _two_tiles(
    N: int, K: int, tokens: int, Ms: tuple[int, ...]
) -> Iterator[tuple[WavesTile, float]]:
    """Yield pairs of tiles with their time a token."""
    for head, cost in _HEADS:
        for tail in _TAILS:
            if K // 64 // (tail.chunks_per_step * tail.split_k) < _FEWEST_STEPS:
                continue
            waves = WavesTile(head, tail, MULTIPROCESSORS)
            if waves.head_rows(tokens, N) < N:  # else warm-up would not compile the tail
                yield waves, sum(_us_of_two(waves, cost, N, K, M) / M for M in Ms)


def _us_of_two(waves: WavesTile, cost: Cost, N: int, K: int, M: int) -> float:
    rows = waves.head_rows(M, N)
    us = _us(waves.head, cost, rows, K, M)
    if rows == N:
        return us
    tail = replace(cut(waves.tail, N - rows, K, M), reordered=0)  # the head's launch did
    return tail_estimate(us, estimate(tail, _128X64[1]))


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
