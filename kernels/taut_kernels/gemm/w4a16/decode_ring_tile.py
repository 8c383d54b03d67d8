"""How the ring kernel is cut up: a tile and the shared memory it takes.

Its measured tiles stand in the tables of :mod:`.lookup`, which choose a kernel
for more than 8 tokens; :mod:`.rule` chooses it for a shape nobody measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from taut_kernels.gemm.w4a16.ring_tile import SHARED_BYTES, scale_bytes

MAX_TOKENS = 64
"""Most tokens the kernel takes: eight tiles of 8."""
_RESERVED_BYTES = 2048
"""Left to the compiler."""


class Cut(NamedTuple):
    """What a form of the kernel knows of its tile, one constant."""

    token_tiles: int  # of 8 tokens: 1, 2, 4 or 8
    row_tiles: int  # 16-row tiles a warp
    row_warps: int  # warps of a program
    chunks_per_step: int  # a warp's, 2 or 4: a step has whole groups
    split_k: int  # programs along K
    stages: int  # of the ring, even


@dataclass(frozen=True, slots=True)
class RingTile:
    """One way to cut the work.

    Args:
        row_tiles: tiles of 16 output rows a warp, 1 or 2.
        row_warps: warps of a program beside each other along N, 4, 8 or 16; they share their
            activations.
        chunks_per_step: chunks of 64 K indices a warp takes between two barriers, 2 or 4.
        split_k: programs along K, 1..32; more than one adds a last-program reduction.
        stages: steps the ring holds, 2..10 and even; fewer where they do not fit.
        registers: most a thread may have; 0 leaves it to ptxas.

    Raises:
        ValueError: a field is out of its range.
    """

    row_tiles: int
    row_warps: int
    chunks_per_step: int
    split_k: int
    stages: int
    registers: int = 0

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[int, ...]] = {
            "row_tiles": (1, 2),
            "row_warps": (4, 8, 16),
            "chunks_per_step": (2, 4),
            "split_k": tuple(range(1, 33)),
            "stages": (2, 4, 6, 8, 10),
        }
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise ValueError(f"{field} must be one of {values}, got {getattr(self, field)}")
        if self.registers and not 32 <= self.registers <= 255:
            raise ValueError(f"registers must be 0 or lie in 32..255, got {self.registers}")

    def __str__(self) -> str:
        cut = f"{self.rows}r/{self.row_warps}w/k{self.split_k}"
        cap = f"/{self.registers}" if self.registers else ""
        return f"ring/{cut}/{self.chunks_per_step}c/{self.stages}s{cap}"

    @property
    def num_warps(self) -> int:
        """Warps a program."""
        return self.row_warps

    @property
    def rows(self) -> int:
        """Output rows a program."""
        return 16 * self.row_tiles * self.row_warps

    def stage_bytes(self, token_tiles: int, group_size: int, *, has_zeros: bool) -> int:
        """Return the shared memory of one stage.

        Args:
            token_tiles: of :func:`token_tiles`.
            group_size: G, or 0 for one group a channel.
            has_zeros: with zero points.
        """
        weights = self.num_warps * self.chunks_per_step * self.row_tiles * 512
        activations = self.chunks_per_step * 2 * token_tiles * 512
        scales = scale_bytes(self.chunks_per_step, group_size, has_zeros=has_zeros)
        return weights + activations + scales * self.row_tiles * self.num_warps

    def stages_that_fit(self, token_tiles: int, group_size: int, *, has_zeros: bool) -> int:
        """Return how many stages the ring gets.

        Args:
            token_tiles: of :func:`token_tiles`.
            group_size: G, or 0 for one group a channel.
            has_zeros: with zero points.

        Returns:
            Two at least: so many of the largest tile fit.
        """
        size = self.stage_bytes(token_tiles, group_size, has_zeros=has_zeros)
        fit = (SHARED_BYTES - _RESERVED_BYTES) // size
        return min(self.stages, fit - fit % 2)


def token_tiles(M: int) -> int:
    """Return how many tiles of 8 tokens the kernel computes for M tokens: 1, 2, 4 or 8."""
    tiles = 1
    while 8 * tiles < M:
        tiles *= 2
    return tiles
