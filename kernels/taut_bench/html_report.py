"""One HTML file out of the CSVs of a benchmark run: plots over sizes and rivals, and the tables.

The file is complete in itself: no script, no style sheet, no image from elsewhere. A CSV is plotted
where it has one of two forms:

- long: columns ``kernel``, ``us``, perhaps ``p20_us`` and ``p80_us``, and before ``kernel`` a size,
  one of :data:`.report_cells.SIZES`, or else ``case``; the other columns before ``kernel`` group
  rows into plots. Where several are sizes, each kind of row (by its first column) lies along the
  one that needs the fewest plots
- wide: ``us``, ``best_rival``, ``rival_us`` and a size, before it what groups; ours and the rival
  become two series

What :mod:`.plots` draws besides (the whole engine) is drawn here too. Every other CSV is shown as a
table, with the reason why there is no plot. The environment is the line that starts with "Measured
with" in the Markdown file beside the CSV.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from taut_bench import plots
from taut_bench.report_cells import (
    CASE,
    Cell,
    Table,
    cells_of,
    groups_of,
    tables_of,
    why_no_plot,
)
from taut_bench.report_cells import ReportError as ReportError

_TEMPLATE = "report.html.j2"
# What matplotlib would say about itself, with addresses, in every plot.
_NO_METADATA: dict[str, str | None] = dict.fromkeys(("Date", "Creator", "Format", "Type"))


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
    cells = [] if no_plot else cells_of(file, header, rows)
    drawn = _plots(file, header, cells)
    return Section(
        file.stem,
        environment,
        drawn,
        None if drawn else no_plot or "no rows",
        tuple(tables_of(cells)),
        tuple(header),
        tuple(tuple(row) for row in rows),
    )


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
        for _, found in groups_of(cells)
    ]
    lines = list(dict.fromkeys(point.line for _, points in groups for point in points))
    drawn = []
    for found, points in groups:
        axis = found[0].axis
        cases = list(dict.fromkeys(cell.label for cell in found)) if axis == CASE else None
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
