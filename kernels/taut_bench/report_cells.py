"""The measured times in a benchmark's CSV: what lies along x, what is compared with what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

SIZES = ("M", "tokens", "batch", "T", "N", "V")
"""Columns that may lie along x, the first of equals ahead."""
CASE = "case"
_FLOOR = "copy"


class ReportError(ValueError):
    """A report cannot be made; one line that names the file and the way out."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured time.

    Attributes:
        axis: column that lies along x.
        group: what the plot is of, for example ``gate_up N=28672 K=4096``.
        size: value on the horizontal axis; of a case its number.
        label: the same in words.
        kernel: whose.
        us: median, µs per call.
        low: 20th percentile, or the median where it was not kept.
        high: 80th percentile, likewise.
    """

    axis: str
    group: str
    size: float
    label: str
    kernel: str
    us: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """One line of a table of ratios.

    Attributes:
        group: what was measured, or the case.
        cells: one a size: best rival over ours (> 1: ours is faster) with the rival's name, or a
            dash.
    """

    group: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Ours against the best rival, for the plots along one axis; of cases, for one plot.

    Attributes:
        axis: column along x; of cases, what the plot is of.
        sizes: heads of the columns.
        ratios: the lines.
    """

    axis: str
    sizes: tuple[str, ...]
    ratios: tuple[Ratio, ...]


def why_no_plot(header: Sequence[str]) -> str | None:
    """Say why a CSV with these columns has no plot; None where it has."""
    if not _size_columns(header):
        return f"no size among the columns ({', '.join((*SIZES, CASE))})"
    if "us" not in header:
        return "no column 'us'"
    if "kernel" not in header and not {"best_rival", "rival_us"} <= set(header):
        return "no column 'kernel', nor 'best_rival' with 'rival_us'"
    return None


def _size_columns(header: Sequence[str]) -> list[str]:
    """Columns that can lie along x: of a long CSV those before ``kernel``, of others the first."""
    if "kernel" not in header:
        return [name for name in SIZES if name in header][:1]
    before = header[: list(header).index("kernel")]
    return [name for name in SIZES if name in before] or [name for name in before if name == CASE]


def cells_of(file: Path, header: list[str], rows: list[list[str]]) -> list[Cell]:
    """Return the times of a CSV that has a plot.

    Raises:
        ReportError: a figure is no number.
    """
    named = [dict(zip(header, row, strict=True)) for row in rows]
    found: list[Cell] = []
    for number, (values, size) in enumerate(zip(named, _axes(header, named), strict=True), 2):
        try:
            found += _cells_in(values, size, _keys(header, size))
        except ValueError as error:
            raise ReportError(f"{file}: row {number}: {error}") from error
    return list(_with_cases_numbered(found))


def _with_cases_numbered(cells: Sequence[Cell]) -> Iterator[Cell]:
    known: dict[str, list[str]] = {}
    for cell in cells:
        if cell.axis != CASE:
            yield cell
            continue
        cases = known.setdefault(cell.group, [])
        if cell.label not in cases:
            cases.append(cell.label)
        yield replace(cell, size=1.0 + cases.index(cell.label))


def _keys(header: Sequence[str], size: str) -> list[str]:
    """Columns that say what was measured: before the series, or the size where there is none."""
    end = list(header).index("kernel" if "kernel" in header else size)
    return [name for name in header[:end] if name != size]


def _axes(header: Sequence[str], rows: Sequence[dict[str, str]]) -> list[str]:
    """Choose the column that lies along x for each row."""
    candidates = _size_columns(header)

    def plots_along(size: str, kind: str) -> int:
        keys = _keys(header, size)
        return len({tuple(row[key] for key in keys) for row in rows if row[header[0]] == kind})

    chosen = {
        kind: min(candidates, key=lambda size: plots_along(size, kind))
        for kind in dict.fromkeys(row[header[0]] for row in rows)
    }
    return [chosen[row[header[0]]] for row in rows]


def _cells_in(values: dict[str, str], size: str, keys: Sequence[str]) -> list[Cell]:
    named = ((key, values[key]) for key in keys)
    group = " ".join(f"{key}={value}" if _is_number(value) else value for key, value in named)
    label, at = values[size], 0.0
    if size != CASE:
        at = float(label)
        label = f"{at:g}"
    us = float(values["us"])
    low, high = (float(values.get(name, us)) for name in ("p20_us", "p80_us"))
    found = [Cell(size, group, at, label, values.get("kernel", "taut"), us, low, high)]
    if "kernel" not in values and values["rival_us"]:
        rival = float(values["rival_us"])
        found.append(Cell(size, group, at, label, values["best_rival"], rival, rival, rival))
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def groups_of(cells: Sequence[Cell]) -> list[tuple[str, list[Cell]]]:
    """Return the cells of each plot, with what it is of."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.axis, cell.group), []).append(cell)
    return [(group, found) for (_, group), found in groups.items()]


def tables_of(cells: Sequence[Cell]) -> list[Table]:
    """Return ours against the best rival."""
    tables = []
    for axis in dict.fromkeys(cell.axis for cell in cells):
        here = [cell for cell in cells if cell.axis == axis]
        if axis == CASE:
            for group, found in groups_of(here):
                cases = list(dict.fromkeys(cell.label for cell in found))
                lines = (Ratio(case, _ratios(found, [case])) for case in cases)
                tables.append(Table(group, ("best rival ÷ ours",), tuple(lines)))
            continue
        labels = [cell.label for cell in sorted(here, key=lambda cell: cell.size)]
        sizes = tuple(dict.fromkeys(labels))
        lines = (Ratio(group, _ratios(found, sizes)) for group, found in groups_of(here))
        tables.append(Table(axis, sizes, tuple(lines)))
    return tables


def _ours(kernel: str) -> bool:
    return kernel.startswith("taut")


def _rival(kernel: str) -> bool:
    return not _ours(kernel) and kernel != _FLOOR and "(other " not in kernel


def _ratios(cells: Sequence[Cell], labels: Sequence[str]) -> tuple[str, ...]:
    found = []
    for label in labels:
        here = [cell for cell in cells if cell.label == label]
        ours = min((cell.us for cell in here if _ours(cell.kernel)), default=None)
        rivals = [cell for cell in here if _rival(cell.kernel)]
        if ours is None or not rivals:
            found.append("–")
            continue
        best = min(rivals, key=lambda cell: cell.us)
        found.append(f"{best.us / ours:.2f} ({best.kernel})")
    return tuple(found)
