"""Ways to cut the work of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """One way to cut the work of prefill, forward or backward.

    Args:
        block_m: queries a program or step, a power of two of at least 16.
        block_n: keys a step or program, likewise.
        num_warps: warps a program.
        num_stages: steps whose loads are under way at once.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}/{self.num_warps}w/{self.num_stages}s"

    def options(self) -> dict[str, int]:
        """Return what the compiler is told."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True, slots=True)
class HopperTile:
    """One way to cut the work of prefill's forward kernel of sm_90, 128 queries a tile.

    Args:
        block_n: keys a step, 64 or 128.
        num_stages: blocks of keys, and as many of values, that shared memory holds.
    """

    block_n: int
    num_stages: int

    def __str__(self) -> str:
        return f"128x{self.block_n}/{self.num_stages}s"


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """One way to cut the work of paged decode.

    Args:
        keys: of a warp and step, a power of two of at least 16.
        num_warps: warps a program, a power of two.
        num_stages: steps whose loads are under way at once.
        per_sm: programs that a multiprocessor has room for, or as many as are worth while.
        min_keys: of a program, where a sequence has as many.

    Raises:
        ValueError: a field is out of its range.
    """

    keys: int
    num_warps: int
    num_stages: int
    per_sm: int
    min_keys: int

    def __post_init__(self) -> None:
        if self.keys not in (16, 32, 64):
            raise ValueError(f"keys must be 16, 32 or 64, got {self.keys}")
        if self.num_warps not in (1, 2, 4, 8):
            raise ValueError(f"num_warps must be 1, 2, 4 or 8, got {self.num_warps}")
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must lie in 1..8, got {self.num_stages}")
        if self.per_sm < 1 or self.min_keys < 1:
            raise ValueError(f"per_sm and min_keys must be positive, got {self}")

    def __str__(self) -> str:
        cut = f"{self.num_warps}x{self.keys}/{self.num_stages}s"
        return f"{cut}/{self.per_sm}p/{self.min_keys}k"

    def options(self) -> dict[str, int]:
        """Return what the compiler is told."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


Tile = AttentionTile | HopperTile | DecodeTile
