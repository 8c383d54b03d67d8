"""Which cuts of 256 and more tokens :mod:`.tune_w4a16_wgmma` tries besides.

Two tiles fed by TMA where one leaves much of a last wave empty, uneven blocks, and groups of
blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import triton

from taut_kernels.gemm.w4a16.pair_tile import WavesTile
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile

_MULTIPROCESSORS = 132
_FED_LARGE = (
    WgmmaRingTile(128, 2, 2, 2, 1, 4, registers=168, parts=2, running=2, tma=True),
    WgmmaRingTile(256, 1, 2, 2, 1, 3, registers=168, parts=2, running=2, tma=True),
)
"""One program a multiprocessor: 256 rows × 128 tokens, and 128 × 256."""
_FED_SMALL = (
    WgmmaRingTile(128, 1, 2, 2, 1, 5, registers=168, parts=2, running=2, tma=True),
    WgmmaRingTile(128, 1, 1, 2, 1, 3, registers=128, parts=2, running=2, tma=True),
)
"""128 rows × 128 tokens, one program a multiprocessor; 64 × 128, two."""
_192X128 = WgmmaRingTile(192, 1, 2, 2, 1, 3, registers=168, parts=2, running=2, tma=True)
_FED_UNEVEN = (
    WgmmaRingTile(192, 2, 2, 1, 1, 6, registers=168, parts=4, running=2, tma=True),
    WgmmaRingTile(192, 2, 2, 1, 1, 6, registers=168, parts=4, running=1, tma=True),
    WgmmaRingTile(288, 1, 2, 1, 1, 5, registers=168, parts=4, running=2, tma=True),
    WgmmaRingTile(320, 1, 2, 1, 1, 5, registers=168, parts=4, running=2, tma=True),
    WgmmaRingTile(384, 1, 2, 1, 1, 4, registers=168, parts=4, running=2, tma=True),
    _192X128,
)
"""One program a multiprocessor: 256 rows × 192 tokens, 128 × 288, 320 and 384, and 128 × 192. With
steps of two chunks 256 rows take 19 % longer, and the second form spills least."""
_FEWEST_OF_UNEVEN = 129
_FED_SPLITS = 8
_MOST_SPLITS = {_FED_LARGE[0]: 5, _FED_LARGE[1]: 1, _192X128: 1}
"""Beyond which adding the parts spills more than 32 bytes a thread (Triton 3.9); uneven blocks take
none."""
_GROUP_TOKENS = 1024
"""Of a group of blocks at most: 8 of 128 tokens or 4 of 256 beside each other read the least by
count."""
_GROUPED_FROM = 1024
_LARGEST_GROUP = 16
_SPLIT_COST = 0.02
"""Of a head's wave, for every further split of the tail: its sums, roughly."""
_FED_KEPT = 2
"""Splits tried for each pair of tiles."""
_LEAST_STEPS = 4
_WORTH = 0.97
"""Of the whole waves that the head's tile alone would take."""


def fed_waves_candidates(N: int, K: int, M: int) -> Iterator[WavesTile]:
    """Yield pairs of tiles fed by TMA for one shape and number of tokens, 129 or more.

    A head of whole waves, then what is left with K split, so that its waves are full and short;
    those that promise to be shorter than the head's tile alone.

    Args:
        N: output features.
        K: input features.
        M: tokens.
    """
    heads = (*_FED_LARGE, *(tile for tile in _FED_UNEVEN if tile is not _192X128))
    for head, tail in itertools.product(heads, (*_FED_LARGE, *_FED_SMALL, _192X128)):
        for cut in _best_splits(head, tail, N, K, M):
            yield cut
            if M >= _GROUPED_FROM:
                yield replace(cut, head=in_groups(head))


def _best_splits(
    head: WgmmaRingTile, tail: WgmmaRingTile, N: int, K: int, M: int
) -> list[WavesTile]:
    """Return a pair of tiles with the most promising splits of the tail's K, if any is worth it."""
    waves = WavesTile(head, tail, _MULTIPROCESSORS)
    rows = waves.head_rows(M, N)
    if rows == N:
        return []
    found = []
    for split in range(1, _MOST_SPLITS.get(tail, _FED_SPLITS) + 1):
        cut = replace(waves, tail=replace(tail, split_k=split))
        estimate = _waves(head, rows, M) + _tail_waves(head, tail, N - rows, M, split)
        long_enough = K // (64 * tail.chunks_per_step * split) >= _LEAST_STEPS
        worth = estimate < _WORTH * _waves(head, N, M)
        if worth and long_enough and cut.why_not(N, M) is None:
            found.append((estimate, split, cut))
    return [cut for _, _, cut in sorted(found, key=lambda one: one[:2])[:_FED_KEPT]]


def in_groups(tile: WgmmaRingTile) -> WgmmaRingTile:
    """Return a tile fed by TMA whose programs that run at once share blocks of either operand."""
    blocks = _GROUP_TOKENS // tile.block_m
    return replace(tile, group_m=1 << blocks.bit_length() - 1)


def grouped_candidates(M: int) -> Iterator[WgmmaRingTile]:
    """Yield tiles fed by TMA whose order may matter: where many blocks of tokens follow each other.

    Groups of 1024 tokens, and, where it is another one, a group of all blocks: an unequal last
    group reads the weights once more.

    Args:
        M: tokens.
    """
    if M < _GROUPED_FROM:
        return
    for tile in (*_FED_LARGE, _FED_SMALL[1], *_FED_UNEVEN):
        grouped = in_groups(tile)
        yield grouped
        blocks = -(-M // tile.block_m)
        if grouped.group_m < blocks <= _LARGEST_GROUP:
            yield replace(tile, group_m=triton.next_power_of_2(blocks))


def uneven_candidates(M: int) -> Iterator[WgmmaRingTile]:
    """Yield tiles of uneven blocks in the order that suits few of them, for 129 tokens or more.

    Args:
        M: tokens.
    """
    for tile in _FED_UNEVEN:
        if max(_FEWEST_OF_UNEVEN, tile.block_m // 2) <= M:
            yield tile


def _waves(tile: WgmmaRingTile, rows: int, M: int) -> int:
    """Return how many waves of one program a multiprocessor a tile takes."""
    programs = -(-rows // tile.rows) * -(-M // tile.block_m)
    return -(-programs // _MULTIPROCESSORS)


def _tail_waves(head: WgmmaRingTile, tail: WgmmaRingTile, rows: int, M: int, split: int) -> float:
    """Estimate a tail's time in waves of its head, all tiles multiplying at one rate."""
    resident = 2 if tail is _FED_SMALL[1] else 1
    programs = rows // tail.rows * -(-M // tail.block_m) * split
    share = resident * tail.rows * tail.block_m / (head.rows * head.block_m * split)
    waves = -(-programs // (resident * _MULTIPROCESSORS))
    return waves * share + _SPLIT_COST * (split - 1)
