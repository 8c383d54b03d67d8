"""How the decode kernel is cut up for one shape: measured tables and the rule behind them.

A row of the table ``w4a16_decode`` (:mod:`taut_kernels.launch.tile_tables`) is of one N, K and
format for up to 8 tokens, ``us`` those of the numbers of tokens measured. ``tile`` has exactly the
fields of :class:`DecodeTile`. A row may have a ``format`` (:mod:`.weight_format`); a layer takes
the row of its own, else of the nearest. A shape that no table of the card names takes :func:`rule`.
The layout of the weights does not depend on the tile.

For 9 to 16 tokens other kernels won on every shape measured on an H200. This one takes them on
cards without `wgmma`, where nothing else was measured, and where a layer is too narrow or too short
for those (:func:`.lookup.rule`); its tile is :func:`plain_rule`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from taut_kernels.gemm.w4a16 import weight_format
from taut_kernels.gemm.w4a16.cost import MULTIPROCESSORS, Cost, Cut, by_estimate, estimate
from taut_kernels.gemm.w4a16.weight_format import DEFAULT, WeightFormat
from taut_kernels.launch.tile_tables import Reader, Row, measured

TOKENS = 8
"""Of one MMA: as many cost what one costs, and most that tables and cost model are for."""
UNIT = 512
"""K indices a warp works through between two looks at its place (8 chunks of 64)."""
WARPS_WANTED = 1536
"""Warps that keep 132 SMs busy; fewer leave memory idle, more only add reductions (README)."""


class DecodeCut(NamedTuple):
    """What a form of the kernel knows of its tile, one constant."""

    token_tiles: int  # 1 for M ≤ 8, 2 for M ≤ 16
    row_warps: int  # warps beside each other, a 16-row tile each
    k_warps: int  # warps along K
    split_k: int  # programs along K
    depth: int  # chunks of weights in flight
    x_depth: int  # chunks of activations in flight
    batch: int  # chunks consumed between two rounds of loads; divides 8 and both depths
    fence: bool  # keep ptxas from sinking loads to their uses


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """One way to cut the work.

    Args:
        row_warps: warps of a program beside each other along N, a power of two; each has a tile of
            16 output rows.
        k_warps: warps of a program along K, a power of two; at most 16 warps together.
        split_k: programs along K, 1..32; more than one adds a last-program reduction.
        depth: chunks of weights a warp has in flight, 1..8.
        x_depth: chunks of activations, 1..8.
        batch: chunks consumed between two rounds of loads; divides 8, ``depth`` and ``x_depth``.
        fence: keep ptxas from sinking loads to their uses.
        registers: most a thread may have, so that every program is resident at once; 0 leaves it to
            ptxas.

    Raises:
        ValueError: a field is out of its range.
    """

    row_warps: int
    k_warps: int
    split_k: int
    depth: int
    x_depth: int
    batch: int
    fence: bool
    registers: int = 0

    def __post_init__(self) -> None:
        for field, limit in (("split_k", 32), ("depth", 8), ("x_depth", 8)):
            value = getattr(self, field)
            if not 1 <= value <= limit:
                raise ValueError(f"{field} must lie in 1..{limit}, got {value}")
        for field in ("row_warps", "k_warps"):
            value = getattr(self, field)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{field} must be a power of two, got {value}")
        if self.batch < 1 or any(n % self.batch for n in (8, self.depth, self.x_depth)):
            raise ValueError(f"batch must divide 8, depth and x_depth, got {self.batch}")
        if self.registers and not 32 <= self.registers <= 255:
            raise ValueError(f"registers must be 0 or lie in 32..255, got {self.registers}")
        if self.num_warps > 16:
            raise ValueError(f"row_warps × k_warps must be at most 16, got {self.num_warps}")

    def __str__(self) -> str:
        cut = f"{self.rows}r/{self.row_warps}x{self.k_warps}w/k{self.split_k}"
        return f"{cut}/d{self.depth}.{self.x_depth}.{self.batch}{'f' if self.fence else ''}"

    @property
    def num_warps(self) -> int:
        """Warps a program."""
        return self.row_warps * self.k_warps

    @property
    def rows(self) -> int:
        """Output rows a program."""
        return 16 * self.row_warps


def _entry(row: Row) -> tuple[tuple[int, int, WeightFormat], DecodeTile]:
    """Key a row by N, K and format."""
    if row["max_m"] != TOKENS:
        raise ValueError(f"max_m must be {TOKENS}")
    return (row["N"], row["K"], weight_format.of_row(row)), DecodeTile(**row["tile"])


TABLE = "w4a16_decode"
_READER = Reader(
    name=TABLE,
    fields=frozenset({"N", "K", "max_m", "tile", "us"}),
    optional=frozenset({weight_format.FIELD}),
    entry=_entry,
    measured_here=True,
)
parse, tables = _READER.parse, cache(_READER.tables)
CANDIDATES = (
    (DecodeTile(2, 1, 1, 8, 8, 2, False), ((0.0196, 0.120), (0.0137, 0.129), (0.0278, 0.161))),
    (DecodeTile(4, 1, 1, 8, 8, 2, False), ((0.0287, 0.143), (0.0315, 0.119), (0.0378, 0.282))),
    (DecodeTile(2, 2, 1, 8, 8, 2, False), ((0.0483, 0.119), (0.0396, 0.115), (0.0500, 0.219))),
    (DecodeTile(1, 2, 1, 8, 8, 2, False), ((0.0341, 0.056), (0.0318, 0.070), (0.0223, 0.257))),
)
"""Tiles that won for up to 8 tokens on some shape (README, "Other models"), and the figures of
their cost: with a loop, without one under a cap on registers, and without either."""
_SPLITS = (1, 2, 3, 4, 5, 6, 7, 8)
_UNITS_OF_A_LOOP = 3
"""Fewer units a warp make no loop, only its peeled passes: ptxas then aims at 72 registers and
sinks loads to their uses, unless a cap lets it take more."""
_CAPS = (128, 96)
"""16 and 20 warps a multiprocessor; 112 leaves room for no more than 128 does."""
_UNCAPPED = {True: 128, False: 72}
"""What ptxas takes, by whether there is a loop."""
_LANE_REGISTERS = 512
"""Of each of the four schedulers of a multiprocessor, a lane."""


def ranked(N: int, K: int) -> list[DecodeTile]:
    """Return what a shape may run on for up to 8 tokens on sm_90, by the model fastest first.

    Args:
        N: output features, a multiple of 16.
        K: input features.

    Returns:
        Tiles; none where K is too short for them.
    """
    return by_estimate(
        (estimate(cut(tile, N, K), cost), tile)
        for known, figures in CANDIDATES
        for tile, cost in splits_of(known, figures, N, K)
    )


def rule(N: int, K: int, *, hopper: bool) -> DecodeTile:
    """Choose a tile for up to 8 tokens of a shape nobody measured.

    Args:
        N: output features, a multiple of 16.
        K: input features.
        hopper: the card is one of those that tiles were measured on (sm_90).

    Returns:
        The tile.
    """
    found = ranked(N, K) if hopper else []
    return found[0] if found else plain_rule(N, K, TOKENS)


def splits_of(
    tile: DecodeTile, figures: tuple[tuple[float, float], ...], N: int, K: int
) -> Iterator[tuple[DecodeTile, Cost]]:
    """Yield a tile with K whole and split, as long as every warp has some of it, and its cost.

    Args:
        tile: with K whole.
        figures: as in :data:`CANDIDATES`.
        N: output features.
        K: input features.
    """
    units = -(-K // UNIT)
    for splits in _SPLITS:
        shares = tile.k_warps * splits
        if shares > units:
            return
        looped = -(-units // shares) >= _UNITS_OF_A_LOOP
        busiest = -(-(-(-N // tile.rows) * splits) // MULTIPROCESSORS)
        # As many registers as leave every program a place at once.
        fit = [cap for cap in _CAPS if busiest <= _resident(tile, cap)]
        registers = 0 if looped or not fit else fit[0]
        resident = _resident(tile, registers or _UNCAPPED[looped])
        kind = 0 if looped else 1 if registers else 2
        yield replace(tile, split_k=splits, registers=registers), Cost(resident, *figures[kind])


def _resident(tile: DecodeTile, registers: int) -> int:
    return 4 * (_LANE_REGISTERS // registers) // tile.num_warps


def cut(tile: DecodeTile, N: int, K: int) -> Cut:
    """Return what a tile makes of a shape with up to 8 tokens.

    Args:
        tile: how to cut the work.
        N: output features.
        K: input features.
    """
    units = -(-K // (UNIT * tile.k_warps * tile.split_k))
    return Cut(-(-N // tile.rows), tile.split_k, 8 * units, 32 * tile.rows)


def plain_rule(N: int, K: int, M: int) -> DecodeTile:
    """Choose one warp a 16-row tile, then warps along K until the card is full.

    Inside the program as far as K reaches, so that nothing has to meet in memory.

    Args:
        N: output features, a multiple of 16.
        K: input features.
        M: tokens.

    Returns:
        The tile.
    """
    units = -(-K // UNIT)
    k_warps = 1
    while k_warps < min(8, units) and N // 16 * k_warps < WARPS_WANTED:
        k_warps *= 2
    x_depth = 2 if M > TOKENS else 4
    return DecodeTile(1, k_warps, 1, depth=4, x_depth=x_depth, batch=1, fence=False)


@cache
def lookup(
    gpu: str | None, N: int, K: int, weights: WeightFormat = DEFAULT, *, hopper: bool
) -> DecodeTile:
    """Choose the tile of one shape and up to 8 tokens on one card.

    Args:
        gpu: card name, None outside CUDA.
        N: output features.
        K: input features.
        weights: the layer's format.
        hopper: the card is of sm_90.

    Returns:
        The tile measured in the nearest format, or that of :func:`rule`.
    """
    found = (measured(tables(), gpu, (N, K, near)) for near in weights.tried)
    return next(filter(None, found), None) or rule(N, K, hopper=hopper)
