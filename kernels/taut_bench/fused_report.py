"""CSV and Markdown of the fused-op benchmark."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from taut_bench import report
from taut_kernels.tuner.timing import Timing

_COLUMNS = ("form", "N", "M", "kernel", "us", "p20_us", "p80_us", "GB_per_s", "share_of_copy")


@dataclass(frozen=True, slots=True)
class Row:
    """One measured cell.

    Attributes:
        form: operation, a key of :data:`.fused_cases.FORMS`.
        N: columns of the output, or heads.
        M: tokens.
        kernel: whose; ``copy`` is a copy kernel that moves as many bytes.
        timing: of one call.
        moved: bytes a call cannot avoid reading and writing.
        ceiling: copy rate of the card over 1 GiB, bytes read and written a second.
    """

    form: str
    N: int
    M: int
    kernel: str
    timing: Timing
    moved: int
    ceiling: float

    @property
    def rate(self) -> float:
        """Unavoidable bytes a second."""
        return self.moved / (self.timing.median * 1e-6)

    def line(self) -> str:
        """Return the row for a terminal."""
        return (
            f"{self.form:18} N={self.N:<6}M={self.M:<6}{self.kernel:14}"
            f"{self.timing.median:9.2f} us [{self.timing.p20:.2f}, {self.timing.p80:.2f}]"
            f"  {self.rate / self.ceiling:6.1%}"
        )


def write(
    rows: Sequence[Row], notes: Sequence[str], ceiling: float, directory: Path, name: str = "fused"
) -> None:
    """Write ``<name>.csv`` and ``<name>.md``.

    Args:
        rows: every measured cell.
        notes: what was not measured, host costs, and the like.
        ceiling: copy rate of the card, bytes a second.
        directory: made if missing.
        name: of the files.

    Raises:
        OSError: they cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        for row in rows:
            figures = (row.timing.median, row.timing.p20, row.timing.p80)
            rates = (f"{row.rate / 1e9:.1f}", f"{row.rate / row.ceiling:.4f}")
            cells = (row.form, row.N, row.M, row.kernel)
            writer.writerow([*cells, *(f"{us:.3f}" for us in figures), *rates])
    (directory / f"{name}.md").write_text(_markdown(rows, notes, ceiling), encoding="utf-8")


def _markdown(rows: Sequence[Row], notes: Sequence[str], ceiling: float) -> str:
    kernels = list(dict.fromkeys(row.kernel for row in rows))
    lines = [
        report.measured_with(f"copy ceiling {ceiling / 1e12:.2f} TB/s over 1 GiB"),
        "",
        "µs per call, median [p20, p80]; ratio = best rival ÷ ours (> 1: ours is faster); share = "
        "unavoidable bytes of ours over the copy ceiling; copy = a copy kernel of as many bytes.",
        "",
        "| form | N | M | " + " | ".join(kernels) + " | ratio | share |",
        "|" + "---|" * (len(kernels) + 5),
    ]
    cells: dict[tuple[str, int, int], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row.form, row.N, row.M), {})[row.kernel] = row
    for (form, N, M), found in cells.items():
        columns = [_cell(found.get(kernel)) for kernel in kernels]
        lines.append(f"| {form} | {N} | {M} | {' | '.join(columns)} | {_ratio(found)} |")
    return "\n".join([*lines, "", *(f"- {note}" for note in notes), ""])


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    return f"{row.timing.median:.2f} [{row.timing.p20:.2f}, {row.timing.p80:.2f}]"


def _ratio(found: dict[str, Row]) -> str:
    ours = found.get("taut")
    rivals = [row for name, row in found.items() if name not in ("taut", "copy")]
    if ours is None or not rivals:
        return "– | –"
    best = min(rivals, key=lambda row: row.timing.median)
    ratio = best.timing.median / ours.timing.median
    return f"{ratio:.2f} ({best.kernel}) | {ours.rate / ours.ceiling:.0%}"
