"""Tiles of the attention kernels that are worth compiling, for heads of 128 elements on sm_90."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from taut_bench.attention_cases import DIM
from taut_kernels.attention.tile import AttentionTile, DecodeTile, HopperTile

_SHARED_BYTES = 220 * 1024
_MULTIPROCESSOR_BYTES = 228 * 1024
_MOST_WARPS = {1: 16, 2: 12}
"""By bytes of a cached element: of 128 and 168 registers a thread."""


def forward_candidates() -> Iterator[AttentionTile]:
    """Yield the forward kernel's tiles worth compiling."""
    for block_m, block_n, warps, stages in itertools.product(
        (64, 128), (32, 64, 128), (4, 8), (2, 3, 4)
    ):
        # Four warps of 128 rows hold 256 accumulators a thread.
        fits = stages * 4 * block_n * DIM + 2 * block_m * DIM <= _SHARED_BYTES
        if fits and (warps == 8 or block_m == 64):
            yield AttentionTile(block_m, block_n, warps, stages)


def hopper_candidates() -> Iterator[HopperTile]:
    """Yield tiles of the forward kernel of sm_90; all that its shared memory holds."""
    for block_n, stages in ((64, 2), (64, 3), (64, 4), (64, 5), (128, 2)):
        yield HopperTile(block_n, stages)


def backward_candidates() -> Iterator[AttentionTile]:
    """Yield tiles of either backward kernel; both have the same shapes to choose from."""
    for block_m, block_n, warps, stages in itertools.product(
        (32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3)
    ):
        fits = stages * 4 * block_n * DIM + 4 * block_m * DIM <= _SHARED_BYTES
        if fits and block_m * block_n <= 64 * 128 and (warps == 8 or block_m * block_n <= 64 * 64):
            yield AttentionTile(block_m, block_n, warps, stages)


def resident(tile: DecodeTile, size: int) -> int:
    """Return how many programs of a tile a multiprocessor of sm_90 has room for, estimated.

    Args:
        tile: which.
        size: bytes of a cached element.
    """
    # One step less than the stages lies in shared memory, keys and values; queries; the system's.
    shared = (tile.num_stages - 1) * tile.keys * 2 * DIM * size + 2 * 16 * DIM
    by_shared = _MULTIPROCESSOR_BYTES // (shared * tile.num_warps + 1024)
    return min(by_shared, _MOST_WARPS[size] // tile.num_warps)


def decode_candidates(size: int) -> Iterator[DecodeTile]:
    """Yield decode's tiles worth compiling.

    Args:
        size: bytes of a cached element.
    """
    # 64 keys a warp spill registers.
    for keys, warps, stages in itertools.product((16, 32), (1, 2, 4, 8), (2, 3, 4, 5)):
        tile = DecodeTile(keys, warps, stages, 1, 128)
        room = resident(tile, size)
        if room and 4096 <= keys * warps * 2 * DIM * size <= 65536:
            yield dataclasses.replace(tile, per_sm=room)


def splits_candidates(tile: DecodeTile) -> Iterator[DecodeTile]:
    """Yield a tile with other rules for its splits, which compile nothing new."""
    for per_sm, min_keys in itertools.product((1, 2, 3, 4, 6, 8, 10, 12), (64, 128, 256)):
        yield dataclasses.replace(tile, per_sm=per_sm, min_keys=min_keys)
