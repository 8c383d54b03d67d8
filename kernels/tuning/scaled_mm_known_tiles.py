"""The 8-bit products' candidates of a short visit: winners elsewhere, with K split otherwise.

A full search of one shape tries hundreds of tiles; these are a dozen a number of tokens. Used by
`tune_scaled_mm` with ``--known``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm import tile as tiles_scaled_mm_tile
from taut_kernels.gemm.scaled_mm.rule import waves_us
from taut_kernels.gemm.scaled_mm.tile import MULTIPROCESSORS, ScaledMmTile
from tuning.scaled_mm_candidates import cuts_of_few, is_of_few, pairs, resident, widths_of

_SPLITS = (1, 2, 4, 8)
_SPLIT_TOKENS = 128
"""Most tokens for which splitting K was ever worth its sums."""
_HOPELESS = 1.2
"""Times the shortest waves' estimate from which on no tile won; it errs by less."""
_FEWEST_PROGRAMS = 0.6 * MULTIPROCESSORS
"""Fewer leave too many multiprocessors without work, where K can be split further."""


def known_tiles(op: str, N: int, K: int, M: int) -> list[ScaledMmTile]:
    """Return tiles for a shape: winners of either op at half to twice as many tokens.

    Args:
        op: ``fp8_gemm`` or ``w8a8_gemm``.
        N: output features.
        K: input features.
        M: tokens.
    """
    won: dict[ScaledMmTile, None] = {}
    for table in tiles_scaled_mm.tables().values():
        for (row_op, _, _), rows in table.choices.items():
            # Where bytes count, what did best for one kind does for the other.
            if row_op == op or (M <= _SPLIT_TOKENS and row_op in ("fp8_gemm", "w8a8_gemm")):
                won |= dict.fromkeys(_near(tuple(alone for _, (alone, _) in rows), M))
    if M > _SPLIT_TOKENS:
        won = dict.fromkeys(_promising(N, K, M, [*won, *tiles_scaled_mm_tile.tiles_of_parts()]))
    elif is_of_few(M):
        won |= dict.fromkeys(tiles_scaled_mm_tile.tiles_of_few())
    found = [cut for tile in won for cut in _cuts(tile, N, K, M)]
    if M <= _SPLIT_TOKENS:
        found += pairs(N, K, M)  # few enough to try them all
    fit = [tile for tile in found if tiles_scaled_mm_tile.why_not_for(tile, op, N) is None]
    return _without_equal_orders(fit, M)


def _near(buckets: tuple[tiles_scaled_mm.Bucket, ...], M: int) -> Iterator[ScaledMmTile]:
    """Yield the tiles of the buckets that reach into half to twice as many tokens.

    Rings of few tokens come as wide as M asks for, and half as wide; kernel ``few`` for its own
    tokens only.
    """
    first = 1
    for bucket in buckets:
        tile, last = bucket.tile, bucket.max_m or 2 * M
        if first <= 2 * M and last >= M / 2:
            if M <= 64 and tile.kernel == "ring" and tile.block_m <= 64:
                yield from (dataclasses.replace(tile, block_m=rows) for rows in widths_of(M))
            elif tile.kernel != "few" or is_of_few(M):
                yield tile
        first = last + 1


def _promising(N: int, K: int, M: int, tiles: Iterable[ScaledMmTile]) -> list[ScaledMmTile]:
    """Drop tiles fed by TMA whose waves promise to take clearly longer than the shortest."""
    us = {tile: waves_us(tile, N, K, M) for tile in tiles if tile.kernel != "ring"}
    most = _HOPELESS * min(us.values(), default=0.0)
    return [tile for tile in dict.fromkeys(tiles) if us.get(tile, 0.0) <= most]


def _cuts(tile: ScaledMmTile, N: int, K: int, M: int) -> Iterator[ScaledMmTile]:
    """Yield a winner with K split in every way that fits the shape."""
    if tile.kernel == "few":
        yield from cuts_of_few(tile, N, K, M)
        return
    if tile.kernel != "ring":
        shared = tile.split_k == 1 or tiles_scaled_mm_tile.most_shared_tokens(tile) >= M
        if M > 64 and shared:
            yield tile
        return
    if M <= 64 and tile.block_m not in widths_of(M):
        return  # weights read several times, or half of a tile without a token
    programs = -(-N // tile.block_n) * -(-M // tile.block_m)
    if not (places := resident(tile) * MULTIPROCESSORS):
        return
    if M <= 64 and tile.block_m < M and programs > places:
        return  # enough programs without reading weights twice
    splits = [s for s in _SPLITS if K % (tile.block_k * s) == 0 and K // (tile.block_k * s) >= 2]
    if tile.block_m < M or M > _SPLIT_TOKENS:
        splits = [s for s in splits if s == 1]
    enough = [s for s in splits if programs * s >= _FEWEST_PROGRAMS] or splits[-1:]
    for split in enough:
        if split == enough[0] or programs * split <= places:
            yield dataclasses.replace(tile, split_k=split)


def _without_equal_orders(tiles: list[ScaledMmTile], M: int) -> list[ScaledMmTile]:
    """Drop tiles that differ in ``group_m`` only, where one group holds every token tile."""
    kept: dict[tuple[ScaledMmTile, int], ScaledMmTile] = {}
    for tile in tiles:
        blocks = -(-M // tile.block_m)
        order = 0 if blocks <= tile.group_m else tile.group_m
        kept.setdefault((dataclasses.replace(tile, group_m=1), order), tile)
    return list(kept.values())
