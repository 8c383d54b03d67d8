"""How the transpose's rungs are cut up, by the size of an element."""

from __future__ import annotations

from dataclasses import dataclass

VERSIONS = ("v1", "v2", "v3", "v4", "v5")


@dataclass(frozen=True, slots=True)
class TransposeTile:
    """One way to cut the work.

    Args:
        block_r: rows of x a program, a power of two; 1 in V2.
        block_c: columns of x a program, a power of two; 1 in V1.
        num_warps: warps a program.
    """

    block_r: int
    block_c: int
    num_warps: int

    def __str__(self) -> str:
        return f"{self.block_r}x{self.block_c}/{self.num_warps}w"


_TILES = {
    "v1": {2: TransposeTile(1024, 1, 4), 4: TransposeTile(1024, 1, 4)},
    "v2": {2: TransposeTile(1, 1024, 4), 4: TransposeTile(1, 1024, 4)},
    "v3": {2: TransposeTile(16, 16, 1), 4: TransposeTile(16, 16, 1)},
    # The best of 27 on an H200, 8192 × 8192 (`tune_primitives`, 2026-11-22, triton 3.6.0): 67.8 and
    # 134.0 µs; 64×64 with 4 warps took 71.6, 32×64 with 4 144.4, a copy 64.6 and 127.7.
    "v4": {2: TransposeTile(128, 128, 8), 4: TransposeTile(64, 64, 8)},
    "v5": {2: TransposeTile(64, 64, 4), 4: TransposeTile(32, 64, 4)},
}


def tile_of(version: str, itemsize: int) -> TransposeTile:
    """Return the tile of a rung.

    Args:
        version: one of :data:`VERSIONS`.
        itemsize: bytes of an element, 2 or 4.
    """
    return _TILES[version][itemsize]
