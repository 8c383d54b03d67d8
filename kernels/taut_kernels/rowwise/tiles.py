"""How the memory-bound kernels are cut up: measured tables and the rule behind them.

Rows of the table ``fused`` (:mod:`taut_kernels.launch.tile_tables`) are buckets of M of op and N.
``op`` is a key of :data:`OPS`, ``N`` what that op's launcher looks up (columns of the output; for
``rope`` heads of q and k together), ``max_m`` the most tokens the row is for (null: any number),
``tile`` has the fields of :class:`FusedTile`, of which the last two may be left out. A shape that
no table of the card names takes :func:`rule`. On Hopper calls of few rows start early
(:data:`taut_kernels.launch.early_start.EARLY_TOKENS`), whatever the table says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache

from taut_kernels.launch import early_start
from taut_kernels.launch.tile_tables import BucketReader, Row, measured, within

OPS = (
    "rms_norm",
    "add_rms_norm",
    "rms_norm_quant",
    "add_rms_norm_quant",
    "silu_mul",
    "silu_mul_quant",
    "row_quant",
    "rope",
)
RESIDENT_LIMIT = 32768
"""Columns of the longest row a program keeps in registers (64 a thread with 16 warps)."""
_FEW_ROWS = 264
"""Rows with a program each that run at once, two a multiprocessor of the largest Hopper."""


def check_cut(rows: int, block: int, num_warps: int, registers: int) -> None:
    """Check what all row-wise tiles have.

    Raises:
        ValueError: a field is out of its range.
    """
    for field, value in (("rows", rows), ("block", block)):
        if value < 1 or value & (value - 1):
            raise ValueError(f"{field} must be a power of two, got {value}")
    if num_warps not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"num_warps must be 1, 2, 4, 8, 16 or 32, got {num_warps}")
    if registers and not 32 <= registers <= 255:
        raise ValueError(f"registers must be 0 or lie in 32..255, got {registers}")


@dataclass(frozen=True, slots=True)
class FusedTile:
    """One way to cut the work of a row-wise kernel.

    Args:
        rows: rows (for ``rope``: tokens) a program, a power of two.
        block: columns a step (for ``rope``: heads), a power of two.
        num_warps: warps a program: 1, 2, 4, 8, 16 or 32.
        pdl: start before the kernel in front has ended and wait for it inside (programmatic
            dependent launch, sm_90 and later).
        registers: most a thread may have; 0 leaves it to ptxas, which aims lower for the lighter
            tiles and is 2 % slower with it (README, "Tried").

    Raises:
        ValueError: a field is out of its range.
    """

    rows: int
    block: int
    num_warps: int
    pdl: bool = False
    registers: int = 0

    def __str__(self) -> str:
        cap = f"/r{self.registers}" if self.registers else ""
        return f"{self.rows}x{self.block}/{self.num_warps}w{cap}{'/pdl' if self.pdl else ''}"

    def __post_init__(self) -> None:
        check_cut(self.rows, self.block, self.num_warps, self.registers)


def _entry(row: Row) -> tuple[tuple[str, int], FusedTile]:
    if row["op"] not in OPS:
        raise ValueError(f"op must be one of {OPS}")
    return (row["op"], row["N"]), FusedTile(**row["tile"])


_READER = BucketReader(
    name="fused",
    fields=frozenset({"op", "N", "max_m", "tile", "us"}),
    entry=_entry,
    whole=False,
)
parse, tables = _READER.parse, cache(_READER.tables)


def rule(op: str, N: int, M: int) -> FusedTile:
    """Choose a tile for a shape nobody measured.

    Args:
        op: a key of `OPS`.
        N: columns of the output; for ``rope`` heads of q and k.
        M: rows (tokens).

    Returns:
        The tile.
    """
    if op == "rope":
        return FusedTile(1, min(16, 1 << (N - 1).bit_length()), 2 if M >= 64 else 1)
    if op == "silu_mul":
        return FusedTile(1, min(1024, max(32, 1 << (N - 1).bit_length())), 4)
    if op == "row_quant" and M <= _FEW_ROWS and 16384 < N <= RESIDENT_LIMIT:
        # Half the chain of a thread's columns again; of 16 bits, they fit its 64 registers.
        return FusedTile(1, 8192, 32)
    if op == "rms_norm_quant" and 4096 < N <= 8192 and M > _FEW_ROWS:
        # 64 columns a thread: half the warps of other rows of this length, and half as much of
        # what each warp does once a row.
        return FusedTile(1, 1024, 4)
    return _row_rule(N, M)


def _row_rule(N: int, M: int) -> FusedTile:
    """Cut rows so that a thread holds 8 neighbouring columns (16 bytes) a step, 4 or 8 steps."""
    width = max(8, 1 << (N - 1).bit_length())
    if N > RESIDENT_LIMIT:
        # Wider steps spill: the compiler unrolls the passes over the row.
        return FusedTile(1, 4096, 8)
    if width <= 1024:
        # Several short rows a program once there are enough to fill the card.
        rows = max(1, min(2048 // width, 16, 1 << max(0, (M // 264).bit_length() - 1)))
        return FusedTile(rows, width, 4 if rows * width >= 1024 else 1)
    warps = 4 if width <= 4096 else 8 if width <= 16384 else 16
    if M <= _FEW_ROWS:
        # Fewer programs than the card holds: shorter chains of loads in each.
        warps = min(16, warps * 2)
    return FusedTile(1, min(width, 256 * warps), warps)


@lru_cache(maxsize=65536)
def lookup(gpu: str | None, op: str, N: int, M: int, hopper: bool = False) -> FusedTile:
    """Choose the tile of one call.

    Args:
        gpu: card name, None outside CUDA.
        op: a key of `OPS`.
        N: columns of the output; for ``rope`` heads of q and k.
        M: rows (tokens).
        hopper: whether the card can start kernels early (sm_90).

    Returns:
        The measured tile, or that of :func:`rule`; with ``pdl`` where the call starts early.
    """
    tile = _cut(gpu, op, N, M)
    return replace(tile, pdl=True) if hopper and M <= early_start.EARLY_TOKENS else tile


def _cut(gpu: str | None, op: str, N: int, M: int) -> FusedTile:
    found: FusedTile | None = within(measured(tables(), gpu, (op, N)) or (), M)
    return found or rule(op, N, M)


def every_tile(gpu: str | None, op: str, N: int, hopper: bool = False) -> tuple[FusedTile, ...]:
    """Return the distinct tiles a width can be given, for compiling them before serving starts.

    Args:
        gpu: as for :func:`lookup`.
        op: likewise.
        N: likewise.
        hopper: likewise.
    """
    limits = [limit for limit, _ in measured(tables(), gpu, (op, N)) or ()]
    tokens = {1, *(2**i for i in range(17)), *(2**i + 1 for i in range(17))}
    tokens |= {limit for limit in limits if limit is not None}
    # Where early starts end, tiles have two forms: the last M with one and the first without.
    tokens |= {max(1, early_start.EARLY_TOKENS), early_start.EARLY_TOKENS + 1}
    return tuple(dict.fromkeys(lookup(gpu, op, N, M, hopper) for M in sorted(tokens)))
