"""How the `wgmma` kernels are cut up: a tile, and the shared memory that stages of a ring take.

Its measured tiles stand in the tables of :mod:`.lookup`, which choose a kernel
for more than 8 tokens; :mod:`.rule` chooses for a shape nobody measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MAX_TOKENS = 1024
"""Largest bucket of M that a table may give a tile without ``tma``."""
SHARED_BYTES = 227 * 1024
"""Shared memory a program may use on an H100 or H200 (CUDA C++ Programming Guide)."""
UNEVEN_BLOCKS = (96, 192, 288, 320, 384)
"""Tokens that are no power of two: two parts that are, each with sums of its own."""
_RESERVED_BYTES = 1024
"""Left to the compiler."""


class Cut(NamedTuple):
    """What a form of either kernel knows of its tile, one constant."""

    block_m: int  # tokens a program
    row_tiles: int  # of 16 rows a warp: sums of their own
    warps: int  # that multiply; four make a warp group
    chunks_per_step: int  # 2 or 4: a step has whole groups; fed by TMA also 1, maybe half a group
    split_k: int  # programs along K
    stages: int  # of the ring
    parts: int  # products a chunk of a row tile, 1, 2 or 4
    running: int  # products left running while the next one's weights are converted
    group_m: int  # blocks of tokens beside each other; 0: the grid's axis 2
    pieces: int  # of a block of tokens; 3, 5 or 9 are two parts, ``split_k`` is 1


@dataclass(frozen=True, slots=True)
class WgmmaRingTile:
    """One way to cut the work.

    Args:
        block_m: tokens a program, 16..256, a power of two; with ``tma`` one of
            :data:`UNEVEN_BLOCKS`, too, which take no ``split_k``.
        group_tiles: tiles of 64 output rows a warp group, 1 or 2; with 2 one is converted while
            the other is multiplied.
        warp_groups: of a program beside each other along N, 1, 2 or 4; they share activations.
        chunks_per_step: chunks of 64 K indices between two barriers, 2 or 4, a whole number of
            groups; with ``tma`` 1, too.
        split_k: programs along K, 1..16; more than one adds a last-program reduction.
        stages: steps the ring holds, 3..12; one is always being given back.
        registers: most a thread may have; 0 leaves it to ptxas.
        parts: products a chunk of 64 rows, 1, 2 or 4: while one runs the next one's weights are
            converted.
        running: products left running then, 1..3.
        tma: TMA copies weights and activations, the latter in their own order.
        group_m: blocks of tokens whose programs run beside each other, so that what runs at once
            reads few weights and few activations; 0: all rows of a block of tokens first. With
            ``tma`` only.

    Raises:
        ValueError: a field is out of its range.
    """

    block_m: int
    group_tiles: int
    warp_groups: int
    chunks_per_step: int
    split_k: int
    stages: int
    registers: int = 0
    parts: int = 1
    running: int = 1
    tma: bool = False
    group_m: int = 0

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[int, ...]] = {
            "block_m": (16, 32, 64, 128, 256) + (UNEVEN_BLOCKS if self.tma else ()),
            "group_tiles": (1, 2),
            "warp_groups": (1, 2, 4),
            "chunks_per_step": (1, 2, 4) if self.tma else (2, 4),
            "split_k": tuple(range(1, 17)),
            "stages": tuple(range(3, 13)),
            "parts": (1, 2, 4),
            "running": (1, 2, 3),
            "group_m": (0, 2, 4, 8, 16) if self.tma else (0,),
        }
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise ValueError(f"{field} must be one of {values}, got {getattr(self, field)}")
        if self.running >= self.parts * self.chunks_per_step:
            # A whole step's products would still read their weights' registers when the next step
            # begins to write them: seen in SASS, which no wait orders.
            raise ValueError(f"running must be below parts × chunks_per_step, got {self.running}")
        if self.uneven and self.split_k > 1:
            raise ValueError(f"block_m {self.block_m} takes no split_k, got {self.split_k}")
        if self.registers and not 32 <= self.registers <= 255:
            raise ValueError(f"registers must be 0 or lie in 32..255, got {self.registers}")

    def __str__(self) -> str:
        cut = f"{self.block_m}x{self.rows}/{self.warp_groups}x{self.group_tiles}g/k{self.split_k}"
        flags = f"p{self.parts}.{self.running}" + "t" * self.tma
        cap = f"/{self.registers}" if self.registers else ""
        group = f"/g{self.group_m}" if self.group_m else ""
        return f"wring/{cut}/{self.chunks_per_step}c/{self.stages}s{flags}{cap}{group}"

    @property
    def num_warps(self) -> int:
        """Warps a program."""
        return 4 * self.warp_groups

    @property
    def rows(self) -> int:
        """Output rows a program."""
        return 64 * self.group_tiles * self.warp_groups

    @property
    def uneven(self) -> bool:
        """Whether a block of tokens is no power of two."""
        return self.block_m in UNEVEN_BLOCKS

    @property
    def pieces(self) -> int:
        """Copies by TMA that a block of tokens is made of, for each chunk."""
        # As long as the shorter of two parts.
        return self.block_m // (self.block_m & -self.block_m) if self.uneven else 2

    def stage_bytes(self, group_size: int, *, has_zeros: bool) -> int:
        """Return the shared memory of one stage.

        Args:
            group_size: G, or 0 for one group a channel.
            has_zeros: with zero points.
        """
        weights = self.rows * self.chunks_per_step * 32
        activations = self.block_m * self.chunks_per_step * 128
        if self.tma:
            return weights + activations
        scales = scale_bytes(self.chunks_per_step, group_size, has_zeros=has_zeros)
        return weights + activations + scales * (self.rows // 16)

    def stages_that_fit(self, group_size: int, *, has_zeros: bool) -> int:
        """Return how many stages the ring gets.

        Args:
            group_size: G, or 0 for one group a channel.
            has_zeros: with zero points.

        Raises:
            ValueError: three stages do not fit.
        """
        size = self.stage_bytes(group_size, has_zeros=has_zeros)
        reserved = _RESERVED_BYTES + (512 * self.num_warps if self.tma else 0)
        fit = (SHARED_BYTES - reserved) // size
        if fit < 3:
            raise ValueError(f"{self}: three stages of {size} bytes do not fit shared memory")
        return min(self.stages, fit)

    def why_not(self, N: int, M: int) -> str | None:
        """Say why the kernel would refuse a layer.

        Args:
            N: output features.
            M: most tokens.

        Returns:
            A reason, or None where it takes the layer.
        """
        if self.tma and self.rows > N:
            return f"{self} takes {self.rows} features at least, got {N}"
        meetings = -(-N // self.rows) * -(-M // self.block_m)
        if self.split_k > 1 and meetings > N // 16:
            return f"split_k: {meetings} tiles meet, arrivals counts {N // 16}"
        return None

    def cut(self, group_size: int, *, has_zeros: bool, row_tiles: int | None = None) -> Cut:
        """Return the tile as kernels take it.

        Args:
            group_size: G, or 0 for one group a channel.
            has_zeros: with zero points.
            row_tiles: of a warp, where the layer has fewer than the tile.

        Raises:
            ValueError: the tile's ring does not fit shared memory.
        """
        return Cut(
            block_m=self.block_m,
            row_tiles=row_tiles or self.group_tiles,
            warps=self.num_warps,
            chunks_per_step=self.chunks_per_step,
            split_k=self.split_k,
            stages=self.stages_that_fit(group_size, has_zeros=has_zeros),
            parts=self.parts,
            running=self.running,
            group_m=self.group_m,
            pieces=self.pieces,
        )


def whole_quads(chunks: int, group_size: int) -> bool:
    """Say whether a warp's part of a step is whole quads of groups.

    A quad's scales of 16 rows are 32 words that lie together (:mod:`.layout`). Then a stage
    keeps each of them once, and one copy brings them all; else it keeps a group's eight words once
    a lane: four times.

    Args:
        chunks: of 64 columns, the warp's in a step.
        group_size: G, or 0 for one group a channel.
    """
    return group_size != 0 and 64 * chunks % (4 * group_size) == 0


def scale_lines(chunks: int, group_size: int) -> int:
    """Count the lines of 32 words that a row tile's scales of a step take in shared memory.

    A line is a quad's (:func:`whole_quads`) or a group's; a channel's scales, and those of a group
    longer than the step, take one.

    Args:
        chunks: of 64 columns, a warp's in a step.
        group_size: G, or 0 for one group a channel.
    """
    if group_size == 0:
        return 1
    columns = 64 * chunks
    return columns // (4 * group_size) or max(1, columns // group_size)


def zero_quads(chunks: int, group_size: int) -> int:
    """Count the quads whose zero points, eight words each, a row tile takes in a step.

    Part of a quad takes them all: a word holds those of four groups (:mod:`.layout`).

    Args:
        chunks: of 64 columns, a warp's in a step.
        group_size: G, or 0 for one group a channel.
    """
    return max(1, 64 * chunks // (4 * group_size)) if group_size else 1


def scale_bytes(chunks: int, group_size: int, *, has_zeros: bool) -> int:
    """Return what a stage of a ring holds of a row tile's scales and zero points.

    Args:
        chunks: of 64 columns, a warp's in a step.
        group_size: G, or 0 for one group a channel, which no stage holds.
        has_zeros: with zero points.
    """
    if group_size == 0:
        return 0
    zeros = 32 * zero_quads(chunks, group_size) if has_zeros else 0
    return 128 * scale_lines(chunks, group_size) + zeros


def require_meeting_places(tiles: int, N: int) -> None:
    """Refuse a tile that makes more partial sums meet than a layer's ``arrivals`` counts.

    Args:
        tiles: of the result.
        N: output features of the layer.

    Raises:
        ValueError: there are more.
    """
    if tiles > N // 16:
        raise ValueError(f"split_k: {tiles} tiles meet, arrivals counts {N // 16}")
