"""Which cuts of 256 and more tokens :mod:`taut_kernels.bench.tune_w4a16_wgmma` tries besides.

Splits that a launch of its own adds, rings of 256 tokens, and two tiles where one leaves much of a
last wave empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import triton

from taut_kernels.tiles_wgmma import WgmmaTile
from taut_kernels.tiles_wgmma_ring import WgmmaRingTile
from taut_kernels.tiles_wgmma_waves import WavesTile

_MULTIPROCESSORS = 132
_SPLITS = (2, 3, 4, 5)
Tile = WgmmaTile | WgmmaRingTile
_HEADS: dict[Tile, int] = {
    WgmmaTile(128, 1, 8, 1, 1, 3, reordered=True, early_wait=True): 2,
    WgmmaTile(256, 1, 8, 1, 1, 3, reordered=True, early_wait=True): 1,
    WgmmaRingTile(256, 1, 2, 1, 1, 6, reordered=True, parts=2): 1,
    WgmmaRingTile(256, 1, 2, 1, 1, 6, reordered=True, parts=4, running=3): 1,
    WgmmaRingTile(128, 2, 2, 2, 1, 4, reordered=True, parts=2, running=2): 1,
    WgmmaRingTile(128, 1, 2, 1, 1, 5, reordered=True, registers=128, parts=4, running=2): 2,
}
"""Tiles, and how many of their programs a multiprocessor holds."""
_SMALL: dict[Tile, int] = {
    WgmmaTile(128, 1, 4, 2, 1, 3, reordered=True, early_wait=False): 2,
    WgmmaRingTile(128, 1, 1, 2, 1, 3, reordered=True, parts=2, running=2): 2,
}


def waves_candidates(N: int, K: int, M: int) -> Iterator[Tile | WavesTile]:
    """Yield the cuts worth compiling for one shape and number of tokens, 256..1024."""
    every = _HEADS | _SMALL
    yield from _HEADS
    for (tile, resident), split in itertools.product(every.items(), _SPLITS):
        places = resident * _MULTIPROCESSORS
        programs = triton.cdiv(N, tile.rows) * triton.cdiv(M, tile.block_m) * split
        if 0.7 * places <= programs <= places and K // 64 // split >= 8:
            yield replace(tile, split_k=split, summed=True)
    tails = (*_SMALL, *(replace(tile, split_k=2, summed=True) for tile in _HEADS))
    for (head, resident), tail in itertools.product(_HEADS.items(), tails):
        waves = WavesTile(head, tail, resident * _MULTIPROCESSORS)
        if waves.head_rows(M, N) < N:
            yield waves
