"""How the loss kernels are cut up: measured tables and the rule behind them.

A row of the table ``loss`` (:mod:`taut_kernels.launch.tile_tables`) is of one op and vocabulary.
``op`` is one of :data:`OPS` or :data:`RING`, ``V`` the vocabulary, ``tile`` has the fields of
:class:`LossTile`, with :data:`RING` those of :class:`RingTile`. A vocabulary no table has takes
:func:`rule`, or :func:`ring_rule`. ``python -m tuning.tune_loss`` makes tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from taut_kernels.launch.tile_tables import Reader, Row, measured

OPS = ("cross_entropy", "divergence")
RING = "cross_entropy_ring"
"""The op of a table's rows that hold a :class:`RingTile`."""


@dataclass(frozen=True, slots=True)
class LossTile:
    """One way to cut the work of a loss kernel, which gives each program one row.

    Args:
        block: columns a step, a power of two.
        num_warps: warps a program: 1, 2, 4, 8, 16 or 32.
        stages: steps of loads in flight; cross entropy keeps those of 2 in registers.

    Raises:
        ValueError: a field is out of its range.
    """

    block: int
    num_warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.block}/{self.num_warps}w/{self.stages}s"

    def __post_init__(self) -> None:
        if self.block < 1 or self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two, got {self.block}")
        if self.num_warps not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"num_warps must be 1, 2, 4, 8, 16 or 32, got {self.num_warps}")
        if not 1 <= self.stages <= 8:
            raise ValueError(f"stages must lie in 1..8, got {self.stages}")


@dataclass(frozen=True, slots=True)
class RingTile:
    """One way to cut cross entropy that holds rows in a ring of shared memory.

    Args:
        parts: programs that share a row: 1, 2, 4 or 8.
        units: 16-byte pieces of a chunk a thread: 1, 2 or 4.
        num_warps: warps a program: 8, 16 or 32.
        slots: chunks the ring holds, even.
        lag: steps a row's sums have to reach the programs that share it, even.
        per_sm: programs a multiprocessor.

    Raises:
        ValueError: a field is out of its range.
    """

    parts: int
    units: int
    num_warps: int
    slots: int
    lag: int
    per_sm: int

    def __str__(self) -> str:
        shape = f"{self.parts}p/{self.units}u/{self.num_warps}w"
        return f"{shape}/{self.slots}s/{self.lag}l/{self.per_sm}"

    def __post_init__(self) -> None:
        allowed = {"parts": (1, 2, 4, 8), "units": (1, 2, 4), "num_warps": (8, 16, 32)}
        allowed["per_sm"] = (1, 2)
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be one of {values}, got {getattr(self, name)}")
        if self.slots < 4 or self.slots % 2:
            raise ValueError(f"slots must be even and at least 4, got {self.slots}")
        if self.lag < 0 or self.lag % 2:
            raise ValueError(f"lag must be even and at least 0, got {self.lag}")
        # 64 bytes a warp for reductions, and a kilobyte a program that CUDA keeps.
        held = self.per_sm * (self.slots * self.chunk_bytes + 64 * self.num_warps + 1024)
        if held > RING_BYTES:
            raise ValueError(f"slots take {held} bytes a multiprocessor, there are {RING_BYTES}")

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return 16 * self.units * 32 * self.num_warps

    @property
    def registers(self) -> int:
        """Return the most registers a thread that let `per_sm` programs be resident."""
        return min(255, 65536 // (32 * self.num_warps * self.per_sm))

    def chunks(self, V: int) -> int:
        """Count the chunks of a part of a bf16 row: an even number."""
        return 2 * -(-2 * V // (2 * self.parts * self.chunk_bytes))

    def ahead(self, V: int) -> int:
        """Count the chunks on their way: what the row before and the lag leave; odd."""
        return self.slots - 1 - self.chunks(V) - self.lag


RING_BYTES = 228 * 1024
"""Shared memory of a multiprocessor of compute capability 9.0 (CUDA C++ Programming Guide)."""

SCALAR_LOADS = LossTile(8192, 32, 1)
"""Of long rows whose elements are loaded one by one: an address each fills the registers."""


def launch_options(num_warps: int) -> dict[str, Any]:
    """Return what the loss kernels' launchers pass to the compiler.

    Contraction is asked for: an exponent is one fused multiply-add, and Triton 3.10 leaves it out
    by itself.

    Args:
        num_warps: warps a program.
    """
    return {"num_warps": num_warps, "enable_fp_fusion": True}


def _entry(row: Row) -> tuple[tuple[str, int], LossTile | RingTile]:
    if row["op"] not in (*OPS, RING):
        raise ValueError(f"op must be one of {(*OPS, RING)}")
    kind: type[LossTile | RingTile] = RingTile if row["op"] == RING else LossTile
    return (row["op"], row["V"]), kind(**row["tile"])


_READER = Reader(name="loss", fields=frozenset({"op", "V", "tile", "us"}), entry=_entry)
parse, tables = _READER.parse, cache(_READER.tables)


def rule(op: str, V: int) -> LossTile:
    """Choose a tile for a vocabulary nobody measured.

    Taken from what was best on an H200. A long row is read twice, the second time from L2 if the
    rows in flight fit there: 32 warps let one program on a multiprocessor, 34 MB at 132 × 128k × 2
    bytes. Beyond that the second read comes from memory.

    Args:
        op: one of `OPS`.
        V: vocabulary.

    Returns:
        The tile.
    """
    width = 1 << (V - 1).bit_length()
    if width <= 4096:
        return LossTile(max(16, width), 4 if width > 256 else 1, 1)
    if op == "divergence":
        return LossTile(8192, 16, 1) if V <= 32768 else LossTile(4096, 8, 4)
    if V % 8:
        return SCALAR_LOADS
    return LossTile(8192, 16, 1) if V <= 32768 else LossTile(16384, 32, 2)


@lru_cache(maxsize=4096)
def lookup(gpu: str | None, op: str, V: int) -> LossTile:
    """Choose the tile of one call.

    Args:
        gpu: card name, None outside CUDA.
        op: one of `OPS`.
        V: vocabulary.

    Returns:
        The measured tile, or that of :func:`rule`.
    """
    found = measured(tables(), gpu, (op, V))
    return found if isinstance(found, LossTile) else rule(op, V)


_AHEAD_BYTES = 40 * 1024
"""Least a multiprocessor has on its way: the copy rate times the latency of memory, and half."""


def ring_rule(V: int) -> RingTile | None:
    """Choose a ring for a vocabulary nobody measured: as few programs a row as hold it.

    On an H200 8 warps with 32 elements a thread and step are ahead of 16 with 8 or 16 at most
    vocabularies: fewer instructions an element, fewer barriers. A lag takes from what is on its
    way, and pays where four programs or more wait for each other.

    Args:
        V: vocabulary.

    Returns:
        The tile; None for rows longer than eight programs hold.
    """
    for parts in (1, 2, 4, 8):
        tile = RingTile(parts, 4, 8, 14, 2 if parts > 2 else 0, 1)
        if tile.ahead(V) * tile.chunk_bytes >= _AHEAD_BYTES:
            return tile
    return None


@lru_cache(maxsize=4096)
def ring(gpu: str | None, V: int) -> RingTile | None:
    """Choose the ring of one call.

    Args:
        gpu: card name.
        V: vocabulary.

    Returns:
        The measured tile, or that of :func:`ring_rule`.
    """
    found = measured(tables(), gpu, (RING, V))
    return found if isinstance(found, RingTile) else ring_rule(V)
