"""Which cuts of 256 and more tokens :mod:`taut_kernels.bench.tune_w4a16_wgmma` tries besides.

Rings of 128 and 256 tokens, their splits added by a launch of its own, and two tiles where one
leaves much of a last wave empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import triton

from taut_kernels.tiles_wgmma import WgmmaTile
from taut_kernels.tiles_wgmma_ring import WgmmaRingTile
from taut_kernels.tiles_wgmma_waves import WavesTile

_MULTIPROCESSORS = 132
_SPLITS = (2, 3, 4, 5)
_HEAD = WgmmaTile(256, 1, 8, 1, 1, 3, reordered=True, early_wait=True)
"""One program a multiprocessor, as of the next."""
_LARGE = WgmmaRingTile(256, 1, 2, 1, 1, 6, reordered=True, parts=4, running=3)
_SMALL = WgmmaRingTile(128, 1, 1, 2, 1, 3, reordered=True, parts=2, running=2)
"""Two programs a multiprocessor."""
_TAILS = (_SMALL, WgmmaTile(128, 1, 4, 2, 1, 3, reordered=True, early_wait=False))


def waves_candidates(N: int, K: int, M: int) -> Iterator[WgmmaRingTile | WavesTile]:
    """Yield the cuts worth compiling for one shape and number of tokens, 256..1024."""
    for tile, resident in ((_LARGE, 1), (_SMALL, 2)):
        yield tile
        for split in _SPLITS:
            places = resident * _MULTIPROCESSORS
            programs = triton.cdiv(N, tile.rows) * triton.cdiv(M, tile.block_m) * split
            if 0.7 * places <= programs <= places and K // 64 // split >= 8:
                yield replace(tile, split_k=split, summed=True)
    for tail in _TAILS:
        waves = WavesTile(_HEAD, tail, _MULTIPROCESSORS)
        if waves.head_rows(M, N) < N:
            yield waves
