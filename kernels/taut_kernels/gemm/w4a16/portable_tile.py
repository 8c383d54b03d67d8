"""How the portable kernel is cut up: a tile, as :func:`.lookup.plain_rule` chooses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Cut(NamedTuple):
    """What a form of the kernel knows of its tile, one constant."""

    block_m: int  # tokens a program
    chunks_per_step: int  # 1 or 2 chunks of 64 K indices
    split_k: int  # programs along K
    reordered: bool  # activations are in fragment order
    early_wait: bool  # wait for products before the next conversion
    warps: int  # of a program, a 16-row tile each


@dataclass(frozen=True, slots=True)
class WgmmaTile:
    """One way to cut the work.

    Args:
        block_m: tokens a program, 16..256, a power of two.
        num_warps: 4 or 8, of a tile of 16 output rows each; four make a warp group.
        chunks_per_step: chunks of 64 K indices a pass of the loop, 1 or 2 (1 where K/64 is odd).
        split_k: programs along K; more than one adds a last-program reduction.
        reordered: bring the activations into fragment order first, in a launch of its own; else
            each program gathers pairs of columns.
        early_wait: wait for the products of a step before converting the next one's weights, not
            right after issuing them.

    Raises:
        ValueError: a field is out of its range.
    """

    block_m: int
    num_warps: int
    chunks_per_step: int
    split_k: int
    reordered: bool
    early_wait: bool

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[int, ...]] = {
            "block_m": (16, 32, 64, 128, 256),
            "num_warps": (4, 8),
            "chunks_per_step": (1, 2),
            "split_k": tuple(range(1, 17)),
        }
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise ValueError(f"{field} must be one of {values}, got {getattr(self, field)}")

    def __str__(self) -> str:
        cut = f"{self.block_m}x{self.rows}x{64 * self.chunks_per_step}/{self.num_warps}w"
        flags = "r" * self.reordered + "e" * self.early_wait
        return f"{cut}/k{self.split_k}{flags}"

    @property
    def rows(self) -> int:
        """Output rows a program."""
        return 16 * self.num_warps
