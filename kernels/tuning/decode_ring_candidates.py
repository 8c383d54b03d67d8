"""Which tiles of the ring kernel of `mma.sync` :mod:`.tune_w4a16_wgmma` tries."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import triton

from taut_bench.w4a16_format import DEFAULT, Format
from taut_kernels.gemm.w4a16.decode_ring_tile import RingTile, token_tiles

_MULTIPROCESSORS = 132
_REGISTERS = 65536
_RING_BYTES = 220_000
_RING_CAPS: dict[tuple[int, int], tuple[int, ...]] = {
    (1, 2): (96,),
    (2, 2): (128,),
    (1, 4): (104,),
    (2, 4): (128,),
    (1, 8): (128,),
    (2, 8): (255,),
}
"""Registers a thread to allow, about what ptxas wants; by row, token tiles."""
_SMALL_GROUP_CAP = 168
"""Of two row tiles: scales and zero points of groups of 32 spill under a cap of 128."""


def decode_ring_candidates(N: int, K: int, M: int, given: Format = DEFAULT) -> Iterator[RingTile]:
    """Yield the ring tiles worth compiling: several programs a multiprocessor, each place taken.

    A grid that leaves places empty is spread unevenly where kernels start early: the next kernel's
    programs take what is free, two on one multiprocessor and none on another.
    """
    chunks, tokens = K // 64, token_tiles(M)
    for row_tiles, row_warps, split, per_step in itertools.product(
        (1, 2), (4, 8, 16), range(1, 9), (2, 4)
    ):
        steps = chunks // (per_step * split)
        if steps < 4 or steps % 2 or chunks % (per_step * split):
            continue
        # One row tile a warp won only where K was split much (o, down).
        if row_tiles == 1 and split < 4:
            continue
        tile = RingTile(row_tiles, row_warps, per_step, split, 2)
        programs = triton.cdiv(N, tile.rows) * split
        size = tile.stage_bytes(tokens, given.group_size, has_zeros=given.zero_points)
        caps = _RING_CAPS.get((row_tiles, tokens), ())
        if given.group_size == 32 and row_tiles == 2 and tokens in (2, 4):
            caps += (_SMALL_GROUP_CAP,)
        for cap in caps:
            most = _REGISTERS // (32 * tile.num_warps * cap)
            for resident in range(2, most + 1):
                stages = min(_RING_BYTES // resident // size // 2 * 2, 6, steps)
                waves = programs / (resident * _MULTIPROCESSORS)
                # As many programs as are meant must fit, and no more.
                if stages < max(2, per_step) or (
                    resident < most and _RING_BYTES // (stages * size) > resident
                ):
                    continue
                if 0.7 <= waves <= 1 or (row_tiles == 2 and 1.6 <= waves <= 3):
                    yield dataclasses.replace(tile, stages=stages, registers=cap)
