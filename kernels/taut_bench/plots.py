"""Plots of the benchmarks' CSV files: ``python -m taut_bench.plots FILE.csv …``.

One PNG beside each file: a panel a product, form or figure, a line a kernel, tokens (or requests)
along x, both axes logarithmic, p20 to p80 as a band where the file has them. Dozens of tiles are
one line, of the fastest at each number of tokens. Every benchmark draws its own file when it ends;
where matplotlib is not installed, as on a bare GPU machine, it says so and the plot is drawn later
from the CSV, by this command, which needs no GPU.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 4
_DPI = 110
_MOST_OF_OURS = 8
"""Lines of ours that a reader can tell apart; more are tiles in turn, of which the best counts."""
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (1, 4)), (0, (6, 2, 1, 2, 1, 2)))


@dataclass(frozen=True, slots=True)
class Point:
    """One figure of a plot: where it lies, and the range it was seen in."""

    panel: str
    line: str
    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the files of one benchmark hold.

    Attributes:
        needs: columns by which its files are known.
        points: makes the points of one row.
        x: what lies along x.
        ours: lines drawn strongly begin with this.
    """

    needs: frozenset[str]
    points: Callable[[dict[str, str]], list[Point]]
    x: str
    ours: str


def _timed(panel: Callable[[dict[str, str]], str]) -> Callable[[dict[str, str]], list[Point]]:
    def points(row: dict[str, str]) -> list[Point]:
        y, low, high = (float(row[name]) for name in ("us", "p20_us", "p80_us"))
        return [Point(f"{panel(row)}, µs", row["kernel"], float(row["M"]), y, low, high)]

    return points


def _engine(row: dict[str, str]) -> list[Point]:
    rate = float(row["tokens_per_s"])
    step = float(row.get("decode_ms") or row["decode_ms_per_step"])
    x, mode = float(row["batch"]), row["mode"]
    after = f" after {row['context']} tokens" if "context" in row else ""
    return [
        Point(f"tokens/s{after}", mode, x, rate, rate, rate),
        Point(f"decode step{after}, ms", mode, x, step, step, step),
    ]


def _attention(row: dict[str, str]) -> list[Point]:
    cache = f" {row['cache']}" if row["part"] == "decode" else ""
    panel = f"{row['part']}{cache} B={row['B']}, µs"
    y, low, high = (float(row[name]) for name in ("us", "p20_us", "p80_us"))
    return [Point(panel, row["kernel"], float(row["T"]), y, low, high)]


_TIMES = {"M", "kernel", "us", "p20_us", "p80_us"}
_KINDS = (
    _Kind(
        frozenset(_TIMES | {"shape", "N", "K"}),
        _timed(lambda row: f"{row.get('kind', '')} {row['shape']} {row['N']}×{row['K']}".strip()),
        "tokens",
        "taut",
    ),
    _Kind(
        frozenset(_TIMES | {"form", "N"}),
        _timed(lambda row: f"{row['form']} N={row['N']}"),
        "tokens",
        "taut",
    ),
    _Kind(
        frozenset({"part", "B", "T", "cache", "kernel", "us", "p20_us", "p80_us"}),
        _attention,
        "tokens",
        "taut",
    ),
    _Kind(frozenset({"mode", "batch", "tokens_per_s"}), _engine, "requests at once", "prefer"),
)


def read(path: Path) -> tuple[list[Point], str, str]:
    """Read a benchmark's CSV.

    Args:
        path: of the file.

    Returns:
        Its points, what lies along x, and how the names of our lines begin.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no CSV of a benchmark here, or has no rows; names the file.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows, columns = list(reader), set(reader.fieldnames or ())
    kind = next((kind for kind in _KINDS if kind.needs <= columns), None)
    if kind is None:
        raise ValueError(f"{path}: not a CSV of w4a16, scaled_mm, fused or engine")
    try:
        points = [point for row in rows for point in kind.points(row)]
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: a row cannot be read: {error!r}") from error
    points = [point for point in points if point.y > 0]
    if not points:
        raise ValueError(f"{path}: no figure to draw")
    return join_ours(points, kind.ours), kind.x, kind.ours


def join_ours(points: Sequence[Point], ours: str) -> list[Point]:
    """Make one line of ours out of many, of the least figure at each place along x.

    Args:
        points: of a file.
        ours: how the names of our lines begin.

    Returns:
        The points, as they were where our lines are few.
    """
    mine = [point for point in points if point.line.startswith(ours)]
    if len({point.line for point in mine}) <= _MOST_OF_OURS:
        return list(points)
    best: dict[tuple[str, float], Point] = {}
    for point in mine:
        place = (point.panel, point.x)
        if place not in best or point.y < best[place].y:
            best[place] = replace(point, line=f"{ours}, fastest tile")
    return [*best.values(), *(point for point in points if not point.line.startswith(ours))]


def draw(path: Path) -> Path:
    """Draw a benchmark's CSV as a PNG of the same name beside it.

    Args:
        path: of the CSV.

    Returns:
        The PNG.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: a file cannot be read or written.
        ValueError: as :func:`read`.
    """
    from matplotlib.figure import Figure

    points, x_label, ours = read(path)
    panels = list(dict.fromkeys(point.panel for point in points))
    lines = list(dict.fromkeys(point.line for point in points))
    rows, columns = math.ceil(len(panels) / _COLUMNS), min(_COLUMNS, len(panels))
    figure = Figure(figsize=(4 * columns, 3 * rows + 0.7), layout="constrained")
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    axes: list[Axes] = list(grid.flat)
    for axis, panel in zip(axes, panels, strict=False):
        draw_panel(axis, [point for point in points if point.panel == panel], lines, ours)
        axis.set_title(panel, fontsize=9)
        axis.set_xlabel(x_label, fontsize=8)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    known: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        known |= dict(zip(labels, handles, strict=True))
    figure.legend(known.values(), known.keys(), loc="outside upper center", ncols=6, fontsize=8)
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=_DPI)
    return target


def draw_panel(axis: Axes, points: Sequence[Point], lines: Sequence[str], ours: str) -> None:
    """Draw one panel, here or in the HTML report.

    Args:
        axis: where.
        points: of the panel.
        lines: names of all lines; their order gives them their colours.
        ours: lines that begin with this are drawn strongly, several with a dash of their own each.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    here = {point.line for point in points}
    own = [line for line in lines if line.startswith(ours) and line in here]
    for number, line in enumerate(lines):
        found = sorted((point for point in points if point.line == line), key=lambda p: p.x)
        if not found:
            continue
        strong = line in own
        x, y = [point.x for point in found], [point.y for point in found]
        style: dict[str, Any] = {"color": "black" if strong else f"C{number}"}
        dash = _DASHES[own.index(line) % len(_DASHES)] if strong else "-"
        width = 2.2 if strong else 1.1
        # What begins with an underscore (`torch._scaled_mm`) matplotlib leaves out of a legend.
        name = f"torch.{line}" if line.startswith("_") else line
        axis.plot(x, y, marker=".", linewidth=width, linestyle=dash, label=name, **style)
        low, high = [point.low for point in found], [point.high for point in found]
        axis.fill_between(x, low, high, alpha=0.15, linewidth=0, **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    # Ordinary numbers: powers of ten say little where a panel covers less than one.
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())
    axis.grid(which="major", alpha=0.3)
    axis.tick_params(labelsize=7)


def draw_or_say(path: Path) -> str:
    """Draw a benchmark's CSV when the benchmark ends.

    Args:
        path: of the CSV, which has at least one row.

    Returns:
        One line: where the plot is, or why there is none.
    """
    try:
        return f"plot: {draw(path)}"
    except ImportError as error:
        command = f"python -m taut_bench.plots {path.name}"
        return f"no plot: {error}; draw it where matplotlib is installed: {command}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m taut_bench.plots", description=__doc__)
    parser.add_argument("csv", type=Path, nargs="+", help="files the benchmarks wrote")
    for path in parser.parse_args(argv).csv:
        try:
            sys.stdout.write(f"{draw(path)}\n")
        except (ImportError, OSError, ValueError) as error:
            sys.stderr.write(f"error: {error}\n")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
