"""Engines in turns: what each cell took in each order, and how modes compare."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from taut_bench.engine_measure import Cell, Settings
from taut_bench.engine_process import EngineEndedError, EngineProcess

STOCK = "off"


@dataclass(frozen=True, slots=True)
class Row:
    """A mode's cell: medians over the turns, and the turns' least and most.

    Attributes:
        mode: of the engine.
        context: tokens of a prompt.
        batch: prompts at once.
        tokens_per_s: generated, prompts' prefill included in the time.
        decode_ms: of one decode step.
        ratio: tokens a second over those of stock in the same turn; ``None`` without stock.
        least: of these ratios.
        most: of these ratios.
        turns: that were measured.
    """

    mode: str
    context: int
    batch: int
    tokens_per_s: float
    decode_ms: float
    ratio: float | None
    least: float | None
    most: float | None
    turns: int


class Turns:
    """Collects what engines measured."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], dict[str, dict[int, Cell]]] = {}
        self.failed: dict[str, str] = {}

    def take(self, engines: Sequence[EngineProcess], settings: Settings, turn: int) -> None:
        """Measure each cell on every engine, one after the other, odd turns in reverse.

        An engine that ends is in ``failed`` with its status, and asked no more.
        """
        for cell in settings.cells():
            for engine in engines if turn % 2 == 0 else reversed(engines):
                if engine.mode in self.failed:
                    continue
                try:
                    found = engine.measure(*cell)
                except EngineEndedError as ended:
                    self.failed[engine.mode] = str(ended)
                else:
                    self._cells.setdefault(cell, {}).setdefault(engine.mode, {})[turn] = found

    def rows(self, modes: Iterable[str]) -> list[Row]:
        """Return a row for each cell of each mode that was measured."""
        return [
            _row(mode, cell, found[mode], found.get(STOCK, {}))
            for mode in modes
            for cell, found in self._cells.items()
            if mode in found
        ]


def _row(mode: str, cell: tuple[int, int], own: dict[int, Cell], stock: dict[int, Cell]) -> Row:
    rate = statistics.median(found.tokens_per_s for found in own.values())
    step = statistics.median(found.decode_ms for found in own.values())
    both = own.keys() & stock.keys()
    ratios = [own[turn].tokens_per_s / stock[turn].tokens_per_s for turn in sorted(both)]
    middle, least, most = (
        (statistics.median(ratios), min(ratios), max(ratios)) if ratios else (None, None, None)
    )
    return Row(mode, *cell, rate, step, middle, least, most, len(own))


def write(rows: Sequence[Row], notes: Sequence[str], facts: str, path: Path) -> None:
    """Write a table.

    Args:
        rows: at least one.
        notes: lines below it.
        facts: machine, versions and date.
        path: of the CSV; the Markdown lies beside it.
    """
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    columns = "| mode | prompt | batch | tokens/s | decode step, ms | ratio | least to most |"
    lines = [f"Measured with {facts}.", "", columns, "|---|---|---|---|---|---|---|"]
    for row in rows:
        ratio, spread = "–", "–"
        if row.ratio is not None:
            ratio, spread = f"{row.ratio:.2f}", f"{row.least:.2f} to {row.most:.2f}"
        figures = f"{row.tokens_per_s:.0f} | {row.decode_ms:.2f} | {ratio} | {spread}"
        lines.append(f"| {row.mode} | {row.context} | {row.batch} | {figures} |")
    lines += ["", *notes, ""]
    path.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")
