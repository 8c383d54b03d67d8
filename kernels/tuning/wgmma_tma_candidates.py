"""Which tiles with ``tma`` :mod:`.tune_w4a16_wgmma` tries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import triton

from taut_kernels.gemm.w4a16.ring_tile import SHARED_BYTES, WgmmaRingTile

_MULTIPROCESSORS = 132
REGISTERS = 65536
"""Of a multiprocessor."""
FORMS = ((2, 2), (1, 1))
"""Parts of a chunk, and how many run."""
_SHAPES = (
    (1, 1, 4),
    (1, 1, 3),
    (1, 1, 2),
    (1, 1, 1),
    (2, 1, 2),
    (2, 1, 1),
    (1, 2, 2),
    (1, 2, 1),
    (2, 2, 1),
)
"""Tiles of 64 rows a warp group, warp groups, programs a multiprocessor."""
_NEEDED = {
    (1, 32): 72,
    (2, 32): 104,
    (1, 64): 88,
    (2, 64): 136,
    (1, 128): 128,
    (2, 128): 200,
    (1, 192): 168,
    (1, 256): 200,
}
"""About how many registers a thread that multiplies wants, by tiles of 64 rows and tokens."""
_MOST_REGISTERS = 248
"""Of a thread."""
_PRODUCER_REGISTERS = 24 * 128
_FEWEST_TOKENS = 32
"""At 16 nothing won."""
_LEAST_FILL = 0.68


def tma_candidates(
    N: int, K: int, M: int, *, splits: int = 3, forms: tuple[tuple[int, int], ...] = FORMS
) -> Iterator[WgmmaRingTile]:
    """Yield the tiles with ``tma`` worth compiling for one shape and number of tokens, 32 or more.

    Args:
        N: output features.
        K: input features.
        M: tokens.
        splits: of K to try for each cut, those that leave the fewest places empty.
        forms: parts of a chunk, and how many run.
    """
    if M < _FEWEST_TOKENS:
        return
    for block_m, (tiles, groups, resident), per_step in itertools.product(
        (M,) if M <= 128 else (128, 192, 256), _SHAPES, (2, 4)
    ):
        threads = 128 * groups
        cap = min(_MOST_REGISTERS, REGISTERS // (resident * (threads + 128)) // 8 * 8)
        registers = (cap * (threads + 128) - _PRODUCER_REGISTERS) // threads
        if min(registers, _MOST_REGISTERS) < _NEEDED.get((tiles, block_m), 256):
            continue
        tile = WgmmaRingTile(block_m, tiles, groups, per_step, 1, 3, registers=cap, tma=True)
        for split, steps in well_filled(tile, N, K, M, resident)[:splits]:
            stages = min(_tma_stages(tile, resident), 12, max(3, steps))
            if stages < 3:
                continue
            for parts, running in forms:
                yield replace(tile, split_k=split, stages=stages, parts=parts, running=running)


def _tma_stages(tile: WgmmaRingTile, resident: int) -> int:
    # The compiler's, and a kilobyte a program that the card keeps.
    room = SHARED_BYTES // resident - 2048 - 512 * tile.num_warps
    return room // tile.stage_bytes(0, has_zeros=False)


def well_filled(
    tile: WgmmaRingTile, N: int, K: int, M: int, resident: int
) -> list[tuple[int, int]]:
    """Return splits of K and the steps they leave, the fullest card first.

    Args:
        tile: with ``tma``; its own split does not matter.
        N: output features.
        K: input features.
        M: tokens.
        resident: programs a multiprocessor.
    """
    chunks, places = K // 64, _MULTIPROCESSORS * resident
    of_y = triton.cdiv(N, tile.rows) * triton.cdiv(M, tile.block_m)
    found: list[tuple[float, int, int]] = []
    for split in range(1, 17):
        steps = triton.cdiv(chunks, tile.chunks_per_step * split)
        done = steps * tile.chunks_per_step * split
        waves = triton.cdiv(of_y * split, places)
        # A layer's arrivals counts N/16 meetings; uneven blocks take no split.
        meets = split == 1 or (not tile.uneven and of_y <= N // 16)
        if steps < 3 or done > 1.12 * chunks or not meets or tile.rows > N:
            continue
        fill = of_y * split / (waves * places) * chunks / done
        if fill >= _LEAST_FILL and (split == 1 or waves == 1):
            found.append((fill - 0.02 * split - 0.1 * (waves > 1), split, steps))
    return [(split, steps) for _, split, steps in sorted(found, reverse=True)]
