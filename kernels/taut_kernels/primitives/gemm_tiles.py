"""How the product's rungs are cut up: one tile each for V1 to V3, measured tables for V4.

Rows of the table ``gemm`` (:mod:`taut_kernels.launch.tile_tables`) are buckets of M of one (N, K);
``M`` are the numbers of rows measured, ``us`` and ``cublas_us`` the times at each.
``tile`` holds fields of :class:`GemmTile`. What no table of the card names takes :func:`rule`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from taut_kernels.launch.tile_tables import BucketReader, measured, within

VERSIONS = ("v1", "v2", "v3", "v4")
_MULTIPROCESSORS = 132
"""Of an H100 or H200 SXM; what the rule fills."""
_MOST_SPLITS = 16
_LEAST_STEPS = 32


@dataclass(frozen=True, slots=True)
class GemmTile:
    """One way to cut the work.

    Args:
        block_m: rows of c a program, a power of two ≥ 16.
        block_n: columns of c a program, a power of two ≥ 16.
        block_k: indices of K a step, a power of two ≥ 16.
        num_warps: 4 or 8; a warp group (four) takes at least 64 rows.
        num_stages: steps whose loads are under way, ≥ 1.
        group_m: tile rows walked together, V2 and later.
        split_k: programs that share a tile, V4.
        parts: 1, or 2 to store a tile in halves (less shared memory), V4.
        persistent: one program a multiprocessor walks through tiles, V4.
        flatten: one loop over tiles and K instead of two, V4, persistent and unsplit only.

    Raises:
        ValueError: a field is out of its range.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    split_k: int = 1
    parts: int = 1
    persistent: bool = False
    flatten: bool = False

    def __str__(self) -> str:
        size = f"{self.block_m}x{self.block_n}x{self.block_k}"
        marks = f"/g{self.group_m}/k{self.split_k}/h{self.parts}"
        walk = "/p" * self.persistent + "f" * self.flatten
        return f"{size}/{self.num_warps}w/{self.num_stages}s{marks}{walk}"

    def __post_init__(self) -> None:
        for field in ("block_m", "block_n", "block_k"):
            value = getattr(self, field)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{field} must be a power of two of at least 16, got {value}")
        if self.num_warps not in (4, 8):
            raise ValueError(f"num_warps must be 4 or 8, got {self.num_warps}")
        limits = {"num_stages": 8, "group_m": 64, "split_k": _MOST_SPLITS, "parts": 2}
        for field, limit in limits.items():
            if not 1 <= getattr(self, field) <= limit:
                raise ValueError(f"{field} must lie in 1..{limit}, got {getattr(self, field)}")
        if self.flatten and (not self.persistent or self.split_k > 1):
            raise ValueError("flatten needs persistent and split_k 1")


DIRECT = GemmTile(64, 64, 32, 4, 1)
TILED = GemmTile(128, 128, 64, 8, 1)
PIPELINED = GemmTile(128, 256, 64, 8, 3, parts=2, persistent=True, flatten=True)


_READER = BucketReader(
    name="gemm",
    fields=frozenset({"N", "K", "max_m", "tile", "M", "us", "cublas_us"}),
    entry=lambda row: ((row["N"], row["K"]), GemmTile(**row["tile"])),
)
parse, tables = _READER.parse, cache(_READER.tables)


def rule(M: int, N: int, K: int) -> GemmTile:
    """Choose V4's tile for a shape nobody measured, after what won on the H200.

    The large persistent tile where every multiprocessor gets one. Else small ones with deep steps,
    several beside each other, and K split while programs are fewer than multiprocessors and a
    share keeps :data:`_LEAST_STEPS` steps: shorter ones lost to the pass that adds them.

    Args:
        M: rows of c, ≥ 1.
        N: columns of c, ≥ 1.
        K: indices summed over.
    """
    if M > 64 and -(-M // 128) * -(-N // 256) >= _MULTIPROCESSORS:
        return GemmTile(128, 256, 64, 8, 4, 16, parts=2, persistent=True, flatten=True)
    tile = GemmTile(64, 128, 128, 4, 4) if M > 64 else GemmTile(64, 64, 128, 4, 6)
    tiles = -(-M // tile.block_m) * -(-N // tile.block_n)
    steps = -(-K // tile.block_k)
    split = min(_MOST_SPLITS, _MULTIPROCESSORS // tiles, steps // _LEAST_STEPS)
    return replace(tile, split_k=max(1, split))


@cache
def lookup(gpu: str | None, M: int, N: int, K: int) -> GemmTile:
    """Choose V4's tile of one call.

    Args:
        gpu: card name, None outside CUDA.
        M: rows of c, ≥ 1.
        N: columns of c.
        K: indices summed over.
    """
    found: GemmTile | None = within(measured(tables(), gpu, (N, K)) or (), M)
    return found or rule(M, N, K)
