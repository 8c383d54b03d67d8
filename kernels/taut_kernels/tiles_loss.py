"""How the loss kernels are cut up: measured tables and the rule behind them.

A table is ``tiles/loss-<card>.json``::

    {"gpu": "<torch.cuda.get_device_name>", "source": "<command, date, versions>",
     "rows": [{"op": "cross_entropy", "V": 128256, "tile": {…}, "us": …}, …]}

``op`` is one of :data:`OPS`, ``V`` the vocabulary, ``tile`` has the fields of :class:`LossTile`. A
vocabulary no table has takes :func:`rule`. ``python -m taut_kernels.bench.tune_loss`` makes tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from taut_kernels import _tile_tables

OPS = ("cross_entropy", "divergence")
_ROW_FIELDS = {"op", "V", "tile", "us"}


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


@dataclass(frozen=True, slots=True)
class LossTable:
    """The measured tiles of one card, by op and vocabulary."""

    gpu: str
    tiles: dict[tuple[str, int], LossTile]


def parse(text: str, where: str) -> LossTable:
    """Read a table.

    Args:
        text: JSON in the form of the module's docstring.
        where: file name, for errors.

    Returns:
        The table.

    Raises:
        ValueError: an unknown key or op, a missing field, or a shape named twice; names ``where``.
    """
    gpu, listed = _tile_tables.rows_of(text, where)
    tiles: dict[tuple[str, int], LossTile] = {}
    for row in listed:
        if set(row) != _ROW_FIELDS or row["op"] not in OPS:
            raise ValueError(f"{where}: a row needs exactly {sorted(_ROW_FIELDS)}, op in {OPS}")
        key = (row["op"], row["V"])
        if key in tiles:
            raise ValueError(f"{where}: {row['op']} V={row['V']} is there twice")
        tiles[key] = LossTile(**row["tile"])
    return LossTable(gpu, tiles)


@cache
def tables() -> dict[str, LossTable]:
    """Load every card's table, once a process."""
    return _tile_tables.load_all("loss", parse)


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
    table = tables().get(gpu or "")
    found = table.tiles.get((op, V)) if table else None
    return found or rule(op, V)
