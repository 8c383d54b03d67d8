"""Which tiles of the `wgmma` ring kernel :mod:`.tune_w4a16_wgmma` tries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import triton

from taut_bench.w4a16_format import DEFAULT, Format
from taut_kernels.gemm.w4a16.ring_tile import SHARED_BYTES, WgmmaRingTile

_MULTIPROCESSORS = 132
_REGISTERS = 65536
_IN_FLIGHT_BYTES = 20_000
"""Weights on their way to a multiprocessor, at least."""
_SHAPES = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4))
"""Tiles of 64 rows a warp group, warp groups."""
_NEEDED = {16: (80, 112), 32: (96, 128), 64: (128, 168), 128: (168, 255)}
"""About how many registers a thread ptxas wants, by tokens, for one and two tiles of 64 rows."""
_SPLITS = (1, 2, 3, 4, 5, 6, 7, 8)
_FORMS = ((1, 1), (2, 2), (4, 3))
"""Parts of a chunk, and how many run."""


def wgmma_ring_candidates(
    N: int, K: int, M: int, given: Format = DEFAULT
) -> Iterator[WgmmaRingTile]:
    """Yield the tiles worth compiling for one shape and number of tokens, 16..128.

    Programs fill the places of all multiprocessors once, or nearly, or several times.
    """
    chunks = K // 64
    for (tiles, groups), per_step, resident, split in itertools.product(
        _SHAPES, (2, 4), (1, 2, 3, 4), _SPLITS
    ):
        steps = triton.cdiv(chunks, per_step * split)
        if steps < 4 or steps * per_step * split > 1.1 * chunks:
            continue
        threads = 128 * groups
        if resident * threads * _NEEDED[M][tiles - 1] > _REGISTERS:
            continue
        cap = min(255, _REGISTERS // (resident * threads) // 8 * 8)
        tile = WgmmaRingTile(M, tiles, groups, per_step, split, 3)
        size = tile.stage_bytes(given.group_size, has_zeros=given.zero_points)
        stages = min((SHARED_BYTES // resident - 1024) // size, 10, steps + 2)
        in_flight = (stages - 2) * tile.rows * per_step * 32 * resident
        if stages < 3 or in_flight < _IN_FLIGHT_BYTES:
            continue
        waves = triton.cdiv(N, tile.rows) * split / (_MULTIPROCESSORS * resident)
        if 0.7 <= waves <= 1 or (split == 1 and (1.65 <= waves <= 2 or 2.6 <= waves <= 3)):
            registers = cap if cap < 200 else 0
            for parts, running in _FORMS:
                yield replace(
                    tile, stages=stages, registers=registers, parts=parts, running=running
                )
