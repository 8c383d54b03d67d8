"""Which tiles of the 8-bit products are worth compiling for one shape and number of tokens."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from taut_kernels.gemm.scaled_mm.rule import rule
from taut_kernels.gemm.scaled_mm.tile import (
    BLOCK_GROUP,
    FEW_RING_BYTES,
    MULTIPROCESSORS,
    PAIRS,
    ScaledMmTile,
    most_shared_tokens,
    tiles_of_blocks,
    tiles_of_few,
    tiles_of_parts,
    why_not_for,
)

BUCKETS: tuple[tuple[int | None, tuple[int, ...]], ...] = (
    (16, (1, 16)),
    (32, (32,)),
    (63, (48,)),
    (64, (64,)),
    (128, (72, 96, 128)),
    (256, (256,)),
    (512, (320, 512)),
    (1024, (640, 1024)),
    (2048, (1280, 2048)),
    (None, (4096,)),
)
"""Most tokens of a bucket, and the numbers measured in it: near both ends from 65 on, where a tile
of 128 tokens costs the same for any part of them; from 65 to 128 `few` leaves out quarters. From 64
on there are kernels that TMA feeds."""

SHARED_BYTES = 227 * 1024
_RESERVED_BYTES = 1024  # a program's share the driver keeps
_MOST_PROGRAMS = 8  # a multiprocessor: registers and threads end there
_MOST_NARROW = 512  # tokens for which tiles of fewer features than a block of weights may do
_MOST_SINGLE = 256  # tokens for which tiles of one group of warps may do
_LEAST_IN_FLIGHT = 40 * 1024  # bytes a multiprocessor; see kernel-anchors A.2


def rows_of(M: int) -> int:
    """Return the tokens of the smallest ring tile that holds M."""
    return max(16, 1 << (M - 1).bit_length())


def widths_of(M: int) -> tuple[int, ...]:
    """Return the tokens of ring tiles to try: all of M, or half where that is 16 at least.

    Two tiles of half the tokens read the weights twice, once from L2, and fill a wave where whole
    ones would have to split K.
    """
    rows = rows_of(M)
    return (rows, rows // 2) if rows > 16 else (rows,)


def ring_bytes(tile: ScaledMmTile) -> int:
    """Return the shared memory of a ring: every stage holds a tile of weights and of tokens."""
    return tile.num_stages * (tile.block_m + tile.block_n) * tile.block_k


def resident(tile: ScaledMmTile) -> int:
    """Return how many of a ring's programs a multiprocessor holds at once."""
    return _places(ring_bytes(tile))


def _places(size: int) -> int:
    return min(SHARED_BYTES // (size + _RESERVED_BYTES), _MOST_PROGRAMS)


def _few_tokens(N: int, K: int, M: int, early: bool) -> Iterator[ScaledMmTile]:
    """Rings for at most 64 tokens: all programs resident, enough weight bytes in flight.

    Two tiles of half the tokens never split K.
    """
    for block_m, block_n, block_k, stages, split in itertools.product(
        widths_of(M), (64, 128, 256), (128, 256, 512), (3, 4, 6, 8, 12), (1, 2, 4)
    ):
        if K % (block_k * split) or (block_n == 256 and block_m > 32):
            continue
        if split > 1 and block_m < M:
            continue
        for warps in (4, 8) if block_n == 128 else ((8,) if block_n == 256 else (4,)):
            tile = ScaledMmTile("ring", block_m, block_n, block_k, warps, stages, split)
            programs = -(-N // block_n) * -(-M // block_m) * split
            places = resident(tile)
            steps = K // block_k // split
            if not places or steps < 2 or stages > steps + 1:
                continue
            if not 0.7 * MULTIPROCESSORS <= programs <= places * MULTIPROCESSORS:
                continue
            each = min(stages - 1, steps) * block_n * block_k
            if programs / MULTIPROCESSORS * each < _LEAST_IN_FLIGHT:
                continue
            yield tile
            if early and places <= 2:
                # As many programs of the next call find room as leave: they may start early.
                yield from early_starts(tile)


def _middling_tokens(N: int, K: int, M: int, fp8: bool) -> Iterator[ScaledMmTile]:
    for block_m, block_n, warps, stages in (
        (64, 64, 4, 6),
        (64, 128, 4, 4),
        (64, 128, 8, 5),
        (128, 64, 4, 4),
        (128, 64, 4, 6),
        (128, 128, 8, 4),
        (128, 128, 8, 5),
        (128, 128, 4, 4),
        (128, 256, 8, 4),
        (256, 128, 8, 4),
    ):
        if block_m <= max(64, M):
            yield from _splits(ScaledMmTile("ring", block_m, block_n, 128, warps, stages), N, K, M)
    if M > 64:
        yield from _many_tokens(fp8)
    if is_of_few(M):
        for tile in dict.fromkeys(dataclasses.replace(t, split_k=1) for t in tiles_of_few()):
            yield from cuts_of_few(tile, N, K, M)


def _splits(tile: ScaledMmTile, N: int, K: int, M: int) -> Iterator[ScaledMmTile]:
    """Yield a tile with K split while one holds the tokens and two waves the programs."""
    programs = -(-N // tile.block_n) * -(-M // tile.block_m)
    for split in (1, 2, 4):
        shared = most_shared_tokens(tile) >= M and programs * split <= 2 * MULTIPROCESSORS
        if split > 1 and not shared:
            continue
        if K % (tile.block_k * split) == 0:
            yield dataclasses.replace(tile, split_k=split)


def is_of_few(M: int) -> bool:
    """Say whether kernel ``few`` is worth a try: up to 64 tokens rings are as fast."""
    return 64 < M <= 128


def cuts_of_few(tile: ScaledMmTile, N: int, K: int, M: int) -> Iterator[ScaledMmTile]:
    """Yield a tile of kernel ``few`` with K split in every way that fits the shape.

    Its programs, one a multiprocessor, are to fill half of a wave, and not three.

    Args:
        tile: ``kernel`` few.
        N: output features.
        K: input features.
        M: tokens.
    """
    programs = -(-N // tile.block_n) * -(-M // tile.block_m)
    splits = (1, 2, 4) if tile.block_n == 64 and tile.block_m >= M else (1,)
    for split in splits:
        most = 2 * MULTIPROCESSORS if split == 1 else MULTIPROCESSORS
        # The widest tiles are for any more.
        at_most = programs * split <= most or tile.block_n == 256
        enough = programs * split >= 0.45 * MULTIPROCESSORS
        if K % (tile.block_k * split) == 0 and enough and at_most:
            yield dataclasses.replace(tile, split_k=split)


def _many_tokens(fp8: bool) -> Iterator[ScaledMmTile]:
    for block_n, stages in ((256, 4), (128, 6)):
        for group_m in (8, 16, 32):
            yield ScaledMmTile("hopper", 128, block_n, 128, 4, stages, group_m=group_m)
    for group_m in (4, 8, 16):
        yield ScaledMmTile("turns", 128, 128, 128, 4, 6, group_m=group_m)
    if fp8:
        yield ScaledMmTile("turns", 64, 256, 128, 4, 5, group_m=16)
    yield from tiles_of_parts()
    for block_n, warps in ((128, 8), (128, 4)):
        yield ScaledMmTile("ring", 128, block_n, 128, warps, 3)


def candidates(
    N: int, K: int, M: int, *, early: bool = False, fp8: bool = False
) -> Iterator[ScaledMmTile]:
    """Yield the tiles worth compiling.

    Args:
        N: output features.
        K: input features.
        M: most tokens of the bucket.
        early: with tiles that start before the kernel in front has ended; they lose behind one that
            does not let them (kernels/README.md).
        fp8: with the tile only FP8 has.

    Yields:
        Tiles; all but ``pairs`` divide every K evenly.
    """
    if M <= 64:
        yield from _few_tokens(N, K, M, early)
    if M <= 128:
        yield from pairs(N, K, M, early=early)
    if 64 <= M <= 256:
        yield from _middling_tokens(N, K, M, fp8)
    if M > 256:
        yield from _many_tokens(fp8)


def block_candidates(N: int, K: int, M: int, *, early: bool = False) -> Iterator[ScaledMmTile]:
    """Yield the tiles of block-wise FP8 worth compiling: rings within one block, and ``blocks``.

    The rule's comes first, so that tuning never ends behind it.

    Args:
        N: output features.
        K: input features.
        M: most tokens of the bucket.
        early: as of :func:`candidates`.

    Yields:
        Tiles, maybe twice; all but the rule's divide K evenly.
    """
    yield rule("fp8_block", N, K, M)
    if M <= 64:
        few = _few_tokens(N, K, M, early)
        yield from (tile for tile in few if why_not_for(tile, "fp8_block", N) is None)
    if M <= 128:
        some = pairs(N, K, M, early=early)
        yield from (tile for tile in some if why_not_for(tile, "fp8_block", N) is None)
    if M >= 64:
        yield from _block_rings(N, K, M)
    for tile in tiles_of_blocks():
        if _may_do(tile, M):
            cuts = _splits(tile, N, K, M)
            yield from (cut for cut in cuts if why_not_for(cut, "fp8_block", N) is None)


def pairs(N: int, K: int, M: int, *, early: bool = False) -> Iterator[ScaledMmTile]:
    """Yield tiles of kernel ``pairs``: all programs resident, or two at a time in further waves.

    Args:
        N: output features.
        K: input features.
        M: tokens.
        early: as of :func:`candidates`.
    """
    if N % 8:
        return
    sizes = [width for width in widths_of(M) if width <= 64]
    for block_m, block_n, stages, split in itertools.product(
        sizes, (64, 128, 256), (2, 3, 4, 6, 8), (1, 2, 3, 4)
    ):
        if K % 256 or (split > 1 and (block_m < M or block_n > 64)):
            continue
        if (block_m + block_n) * 256 * stages > FEW_RING_BYTES:
            continue
        tile = ScaledMmTile(PAIRS, block_m, block_n, 256, 4, stages, split)
        programs = -(-N // block_n) * -(-M // block_m) * split
        places = resident(tile)
        at_once = programs <= places * MULTIPROCESSORS
        longer = _places(4 * ring_bytes(tile) // stages)
        if stages < 4 and longer and programs <= longer * MULTIPROCESSORS:
            continue  # a short ring is for more programs at a time
        if programs >= 0.42 * MULTIPROCESSORS and (at_once or (split == 1 and places >= 2)):
            yield tile
            if early and places <= 2:
                yield from early_starts(tile)


def _block_rings(N: int, K: int, M: int) -> Iterator[ScaledMmTile]:
    for block_m, block_n, warps, stages in itertools.product(
        (64, 128), (64, 128), (4, 8), (3, 4, 5, 6)
    ):
        # A thread holds the sum and a step's product: with 4 warps 128 × 128 of each do not fit.
        if block_m <= M and (block_m, block_n, warps) != (128, 128, 4):
            yield from _splits(ScaledMmTile("ring", block_m, block_n, 128, warps, stages), N, K, M)


def _may_do(tile: ScaledMmTile, M: int) -> bool:
    """Say whether a tile of kernel ``blocks`` is worth a try for so many tokens."""
    if tile.block_m == 64:
        return M <= _MOST_SINGLE
    return M >= 64 and (tile.block_n == BLOCK_GROUP or M <= _MOST_NARROW)


def early_starts(tile: ScaledMmTile) -> list[ScaledMmTile]:
    """Return the tile's forms that start before the kernel in front has ended."""
    return [dataclasses.replace(tile, early=True, prefetch=lines) for lines in (0, 2, 8)]
