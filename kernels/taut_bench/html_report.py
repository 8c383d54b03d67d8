"""One HTML file out of the CSVs of a benchmark run: plots over sizes and rivals, and the tables.

The file is complete in itself: no script, no style sheet, no image from elsewhere. A CSV is plotted
where it has one of two forms:

- long: columns ``kernel``, ``us``, perhaps ``p20_us`` and ``p80_us``, and before ``kernel`` a size,
  one of :data:`SIZES`, or else ``case``; the other columns before ``kernel`` group rows into plots.
  Where several are sizes, each kind of row (by its first column) lies along the one that needs the
  fewest plots
- wide: ``us``, ``best_rival``, ``rival_us`` and a size, before it what groups; ours and the rival
  become two series

What :mod:`.plots` draws besides (the whole engine) is drawn here too. Every other CSV is shown as a
table, with the reason why there is no plot. The environment is the line that starts with "Measured
with" in the Markdown file beside the CSV.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from taut_bench import plots

SIZES = ("M", "tokens", "batch", "T", "N", "V")
"""Columns that may lie along x, the first of equals ahead."""
_CASE = "case"
_TEMPLATE = "report.html.j2"
_FLOOR = "copy"
# What matplotlib would say about itself, with addresses, in every plot.
_NO_METADATA: dict[str, str | None] = dict.fromkeys(("Date", "Creator", "Format", "Type"))


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


@dataclass(frozen=True)
class Section:
    """One CSV in the report.

    Attributes:
        name: of the file, without its ending.
        environment: what the figures were measured with; empty where nothing says so.
        plots: SVG documents.
        no_plot: why there are none; None where there are.
        tables: ours against the best rival.
        header: columns of the CSV.
        rows: of the CSV.
    """

    name: str
    environment: str
    plots: tuple[str, ...]
    no_plot: str | None
    tables: tuple[Table, ...]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def write(directory: Path, target: Path) -> list[Section]:
    """Write the report of a run.

    Args:
        directory: with the CSVs.
        target: HTML file; its folder is made if missing.

    Returns:
        What stands in it.

    Raises:
        ReportError: no CSV there, one that cannot be read, no template library, or the target
            cannot be written.
    """
    files = sorted(directory.glob("*.csv"))
    if not files:
        raise ReportError(f"{directory}: no CSV of a benchmark in it")
    sections = [section(file) for file in files]
    html = render(sections, directory.resolve().name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(html, encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{target}: cannot be written: {error.strerror}") from error
    return sections


def render(sections: Sequence[Section], title: str) -> str:
    """Fill the template.

    Raises:
        ReportError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ReportError("the report needs jinja2: pip install 'taut[deploy]'") from error
    environment = Environment(
        loader=PackageLoader("taut_bench", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE).render(title=title, sections=sections)


def section(file: Path) -> Section:
    """Read one CSV and draw what can be drawn.

    Raises:
        ReportError: not a CSV with a header, a row that is too long or short, or a figure that is
            no number.
    """
    header, rows = _read(file)
    environment = _environment(file.with_suffix(".md"))
    no_plot = why_no_plot(header)
    cells = [] if no_plot else _cells(file, header, rows)
    drawn = _plots(file, header, cells)
    return Section(
        file.stem,
        environment,
        drawn,
        None if drawn else no_plot or "no rows",
        tuple(_tables(cells)),
        tuple(header),
        tuple(tuple(row) for row in rows),
    )


def why_no_plot(header: Sequence[str]) -> str | None:
    """Say why a CSV with these columns has no plot; None where it has."""
    if not _size_columns(header):
        return f"no size among the columns ({', '.join((*SIZES, _CASE))})"
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
    return [name for name in SIZES if name in before] or [name for name in before if name == _CASE]


def _read(file: Path) -> tuple[list[str], list[list[str]]]:
    try:
        with file.open(newline="", encoding="utf-8") as handle:
            lines = list(csv.reader(handle))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ReportError(f"{file}: cannot be read: {error}") from error
    if not lines or not lines[0]:
        raise ReportError(f"{file}: empty, without a header")
    header, rows = lines[0], [line for line in lines[1:] if line]
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ReportError(f"{file}: row {number} has {len(row)} cells, not {len(header)}")
    return header, rows


def _environment(file: Path) -> str:
    if not file.is_file():
        return ""
    lines = file.read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith("Measured with")), "")


def _cells(file: Path, header: list[str], rows: list[list[str]]) -> list[Cell]:
    named = [dict(zip(header, row, strict=True)) for row in rows]
    found: list[Cell] = []
    for number, (values, size) in enumerate(zip(named, _axes(header, named), strict=True), 2):
        try:
            found += _cells_of(values, size, _keys(header, size))
        except ValueError as error:
            raise ReportError(f"{file}: row {number}: {error}") from error
    return list(_with_cases_numbered(found))


def _with_cases_numbered(cells: Sequence[Cell]) -> Iterator[Cell]:
    known: dict[str, list[str]] = {}
    for cell in cells:
        if cell.axis != _CASE:
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


def _cells_of(values: dict[str, str], size: str, keys: Sequence[str]) -> list[Cell]:
    named = ((key, values[key]) for key in keys)
    group = " ".join(f"{key}={value}" if _is_number(value) else value for key, value in named)
    label, at = values[size], 0.0
    if size != _CASE:
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


def _groups(cells: Sequence[Cell]) -> list[tuple[str, list[Cell]]]:
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.axis, cell.group), []).append(cell)
    return [(group, found) for (_, group), found in groups.items()]


def _tables(cells: Sequence[Cell]) -> list[Table]:
    tables = []
    for axis in dict.fromkeys(cell.axis for cell in cells):
        here = [cell for cell in cells if cell.axis == axis]
        if axis == _CASE:
            for group, found in _groups(here):
                cases = list(dict.fromkeys(cell.label for cell in found))
                lines = (Ratio(case, _ratios(found, [case])) for case in cases)
                tables.append(Table(group, ("best rival ÷ ours",), tuple(lines)))
            continue
        labels = [cell.label for cell in sorted(here, key=lambda cell: cell.size)]
        sizes = tuple(dict.fromkeys(labels))
        lines = (Ratio(group, _ratios(found, sizes)) for group, found in _groups(here))
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


def _plots(file: Path, header: Sequence[str], cells: Sequence[Cell]) -> tuple[str, ...]:
    """Draw a CSV's panels as SVG; none where neither this module nor `plots` knows its form."""
    if not cells:
        try:
            points, x_label, ours = plots.read(file)
        except ValueError:  # no form that can be drawn: the report says so
            return ()
        panels = list(dict.fromkeys(point.panel for point in points))
        lines = list(dict.fromkeys(point.line for point in points))
        each = ([point for point in points if point.panel == panel] for panel in panels)
        return tuple(_svg(found, lines, x_label, ours) for found in each)
    groups = [
        (found, plots.join_ours([_point(cell) for cell in found], "taut"))
        for _, found in _groups(cells)
    ]
    lines = list(dict.fromkeys(point.line for _, points in groups for point in points))
    drawn = []
    for found, points in groups:
        axis = found[0].axis
        cases = list(dict.fromkeys(cell.label for cell in found)) if axis == _CASE else None
        drawn.append(_svg(points, lines, axis, "taut", cases))
    return tuple(drawn)


def _point(cell: Cell) -> plots.Point:
    panel = _literal(f"{cell.group}, µs")
    return plots.Point(panel, _literal(cell.kernel), cell.size, cell.us, cell.low, cell.high)


def _svg(
    points: Sequence[plots.Point],
    lines: Sequence[str],
    x_label: str,
    ours: str,
    cases: Sequence[str] | None = None,
) -> str:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ReportError("plots need matplotlib: pip install 'taut[deploy]'") from error

    figure = Figure(figsize=(5.2, 3.4 if cases is None else 4.4), layout="constrained")
    axes = figure.subplots()
    plots.draw_panel(axes, points, lines, ours)
    axes.set_title(points[0].panel, fontsize=9)
    axes.set_xlabel(x_label, fontsize=8)
    if cases is not None:
        axes.set_xscale("linear")
        names = [_literal(case) for case in cases]
        axes.set_xticks(range(1, 1 + len(cases)), names, rotation=35, ha="right", fontsize=6)
    axes.legend(fontsize=7)
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "taut"}):
        figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _literal(text: str) -> str:
    """Keep matplotlib from reading a dollar sign as mathematics."""
    return text.replace("$", r"\$")
