"""Candidates for a short visit: the tiles that won on some measured shape, K split otherwise.

A full search of one shape takes a minute or more; these are some dozen a number of tokens. Used by
`tune_w4a16_decode` and `tune_w4a16_wgmma` with ``--known``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

from taut_kernels.gemm.w4a16 import decode_tile as tiles_decode
from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16.cost import estimate
from taut_kernels.gemm.w4a16.decode_ring_tile import MAX_TOKENS, RingTile
from taut_kernels.gemm.w4a16.decode_tile import UNIT, DecodeTile
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile
from taut_kernels.gemm.w4a16.weight_format import DEFAULT
from tuning.wgmma_tma_candidates import REGISTERS, tma_candidates, well_filled

_SPLITS = (1, 2, 3, 4, 6, 8)
_PROGRAMS = (60, 1100)
"""Fewer leave multiprocessors without work, more only add partial sums."""
_SPLIT_TOKENS = 1024
"""Most tokens for which splitting K may be worth its sums: more fill the card without it."""
MOST_IDLE = 0.1
"""What may be lost where K does not divide: 37 units by 4 are 8 % longer, and nothing else fits."""
_REGISTERS = (0, 96, 128)
"""Caps for up to 8 tokens (README: loads sunk to their uses)."""
_MOST_BLOCK = 256
"""Tokens of the largest tile."""
_ONE_BLOCK_TOKENS = 128
"""Up to here only winners of the same bucket are tried: the tables have several for each."""


def decode_tiles(N: int, K: int) -> list[DecodeTile]:
    """Return decode tiles for up to 8 tokens: what won on a shape, and what won on several.

    Of symmetric groups of 128; other formats want :func:`lean_decode_tiles`, too.

    Args:
        N: output features.
        K: input features.
    """
    units, found = -(-K // UNIT), []
    for table in tiles_decode.tables().values():
        won = {
            key[:2]: dataclasses.replace(tile, split_k=1, registers=0)
            for key, tile in table.choices.items()
            if key[2] is DEFAULT
        }
        for tile, count in Counter(won.values()).items():
            if count == 1 and won.get((N, K)) != tile:
                continue  # many tiles won once
            for split in range(1, 9):
                programs = -(-N // tile.rows) * split
                if idle_share(units, tile.k_warps * split) > MOST_IDLE:
                    continue
                if not _enough(programs, split):
                    continue
                for cap in _REGISTERS:
                    found.append(dataclasses.replace(tile, split_k=split, registers=cap))
    found.append(tiles_decode.rule(N, K, hopper=True))
    return list(dict.fromkeys(found))


def idle_share(units: int, parts: int) -> float:
    """Return how much longer the longest of equal parts is than an exact share, 0 where they fit.

    Args:
        units: of K.
        parts: warps and programs that share them.
    """
    return -(-units // parts) * parts / units - 1


def product_tiles(N: int, K: int, M: int) -> list[RingTile | WgmmaRingTile]:
    """Return tiles for more than 8 tokens: winners at about as many.

    Args:
        N: output features.
        K: input features.
        M: tokens.
    """
    bucket = tiles_wgmma.bucket_of(M)
    reach = 0 if M <= _ONE_BLOCK_TOKENS else 2
    won: dict[Any, None] = {}
    for table in tiles_wgmma.tables().values():
        near = (tile for key, tile in table.choices.items() if abs(key[2] - bucket) <= reach)
        won |= dict.fromkeys(near)
    found = [cut for tile in won for cut in _cuts(tile, N, K, M)]
    # Few shapes have tiles with `tma` as yet: the best filled cut of every kind.
    found += tma_candidates(N, K, M, splits=1, forms=((2, 2),))
    found += [
        own
        for table in tiles_wgmma.tables().values()
        for key, own in table.choices.items()
        if key[:3] == (N, K, bucket) and isinstance(own, RingTile | WgmmaRingTile)
    ]
    return list(dict.fromkeys(found))


def _cuts(tile: Any, N: int, K: int, M: int) -> Iterator[RingTile | WgmmaRingTile]:
    """Yield a winner with K split in every way that fits the shape."""
    if isinstance(tile, RingTile):
        blocks, step, fewest = 1, tile.chunks_per_step, 4
        fits = M <= MAX_TOKENS
    elif isinstance(tile, WgmmaRingTile) and tile.tma:
        yield from _tma_cuts(tile, N, K, M)
        return
    elif isinstance(tile, WgmmaRingTile):
        blocks, step, fewest = -(-M // tile.block_m), tile.chunks_per_step, 2
        # Half of a block of tokens without a token would be computed for nothing.
        fits = tile.block_m < 2 * M
    else:
        return  # a word, or two tiles cut for one shape
    chunks = K // 64
    if not fits:
        return
    programs = -(-N // tile.rows) * blocks
    for split in _SPLITS if M <= _SPLIT_TOKENS else (1,):
        counted = split == 1 or programs <= N // 16  # what a layer's arrivals counts
        if not counted or chunks // (step * split) < fewest:
            continue
        if _enough(programs * split, split):
            yield dataclasses.replace(tile, split_k=split)


def _tma_cuts(tile: WgmmaRingTile, N: int, K: int, M: int) -> Iterator[WgmmaRingTile]:
    """Yield a winner with `tma`, K split in the two ways that fill the card best."""
    if not min(M, _MOST_BLOCK) <= 2 * tile.block_m < 4 * M:
        return
    resident = max(1, REGISTERS // (tile.registers * (32 * tile.num_warps + 128)))
    for split, _ in well_filled(tile, N, K, M, resident)[:2]:
        yield dataclasses.replace(tile, split_k=split)


def _enough(programs: int, split: int) -> bool:
    return split == 1 or _PROGRAMS[0] <= programs <= _PROGRAMS[1]


_LEAN_QUEUES = ((8, 8, 2), (8, 4, 1), (8, 2, 1), (4, 4, 4), (4, 4, 1), (4, 2, 1), (2, 2, 2))
"""(depth, x_depth, batch) where the scales of small groups take the registers of longer queues."""
_LEAN_CUTS = 7


def lean_decode_tiles(N: int, K: int) -> list[DecodeTile]:
    """Return tiles for up to 8 tokens and small groups or zero points: shorter queues, too.

    Two sets of scales and zero points wait in registers, 40 a lane in groups of 32: the queues that
    won with groups of 128 then spill, or leave room for half as many warps.

    Args:
        N: output features.
        K: input features.
    """
    cuts = [
        (estimate(tiles_decode.cut(tile, N, K), cost), tile)
        for known, figures in tiles_decode.CANDIDATES
        for tile, cost in tiles_decode.splits_of(known, figures, N, K)
    ]
    best = [tile for _, tile in sorted(cuts, key=lambda item: item[0])[:_LEAN_CUTS]]
    won = [
        tile
        for table in tiles_decode.tables().values()
        for key, tile in table.choices.items()
        if key[:2] == (N, K)
    ]
    found = [
        dataclasses.replace(
            tile, depth=depth, x_depth=x_depth, batch=batch, fence=False, registers=cap
        )
        for tile in (*won, *best)
        for depth, x_depth, batch in _LEAN_QUEUES
        for cap in (0, 128)
    ]
    return list(dict.fromkeys((*won, *found)))
