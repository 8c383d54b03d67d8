"""How the reduction's rungs are cut up."""

from __future__ import annotations

from dataclasses import dataclass

VERSIONS = ("v1", "v2", "v3")


@dataclass(frozen=True, slots=True)
class ReduceTile:
    """One way to cut the work.

    Args:
        block_r: elements of the reduced side a step, a power of two.
        block_i: results next to each other a program, a power of two.
        num_warps: warps a program.
        num_stages: steps whose loads are under way.
        share: elements of the reduced side a program takes; 0: all of them, or as many as fill the
            card (``persistent``).
        persistent: as many programs as run at once walk through the work.
        per_sm: programs a multiprocessor, with ``persistent``.
    """

    block_r: int
    block_i: int
    num_warps: int
    num_stages: int = 1
    share: int = 0
    persistent: bool = False
    per_sm: int = 1

    def __str__(self) -> str:
        walk = f"/p{self.per_sm}" if self.persistent else f"/{self.share}"
        return f"{self.block_r}x{self.block_i}/{self.num_warps}w/{self.num_stages}s{walk}"

    def share_of(self, outer: int, R: int, inner: int, programs: int) -> int:
        """Return how many elements of the reduced side a program takes.

        All of them, or a multiple of the step: shares that start at odd elements are read one
        element a load.

        Args:
            outer: of x [outer, R, inner].
            R: elements reduced to one, ≥ 1.
            inner: of x.
            programs: multiprocessors of the card.
        """
        if self.share or not self.persistent:
            return min(R, self.share or R)
        items = outer * -(-inner // self.block_i)
        wanted = max(1, self.per_sm * programs // items)
        # A share of less than four steps is mostly start and join.
        splits = max(1, min(wanted, R // (4 * self.block_r)))
        steps = -(-R // (splits * self.block_r))
        return min(R, steps * self.block_r)


_ALONG = {
    "v1": ReduceTile(4096, 1, 8),
    "v2": ReduceTile(4096, 1, 8, share=16384),
    "v3": ReduceTile(8192, 1, 8, persistent=True, per_sm=4),
}
_ACROSS = {
    "v1": ReduceTile(32, 128, 8),
    "v2": ReduceTile(32, 128, 8, share=256),
    "v3": ReduceTile(64, 128, 8, persistent=True, per_sm=4),
}
_NARROW = 32
"""Results next to each other below which lanes run along the reduced side."""


def tile_of(version: str, *, inner: int) -> ReduceTile:
    """Return the tile of a rung.

    Args:
        version: one of :data:`VERSIONS`.
        inner: results next to each other in memory; 1 along the last dimension.
    """
    if inner >= _NARROW:
        return _ACROSS[version]
    tile = _ALONG[version]
    if inner > 1:
        width = 1 << (inner - 1).bit_length()
        return ReduceTile(
            tile.block_r // width,
            width,
            tile.num_warps,
            tile.num_stages,
            tile.share,
            tile.persistent,
            tile.per_sm,
        )
    return tile
