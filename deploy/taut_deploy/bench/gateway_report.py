"""CSV, Markdown and a picture of a ``taut bench gateway`` run."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from taut_deploy.bench.gateway import Cell, Results
from taut_deploy.bench.gateway_cases import CASES, IDLE
from taut_deploy.bench.rows import listed

_COLUMNS = "system version case figure median lowest highest rounds".split()  # noqa: SIM905
# Shown beside the headline, in this order, where a case has them.
_BESIDE = (
    "p50_ms",
    "p99_ms",
    "done_per_s",
    "events_per_s",
    "rss_mb",
    "ready_s",
    "open",
    "never_closed",
    "unreached",
    "failed",
    "system_cores",
    "harness_cores",
)
_PICTURED = ("small", "large", "sse", "latency", "disconnect-whole", "streams-2000")


def write(results: Results, output: Path) -> list[Path]:
    """Write ``gateway.csv``, ``gateway.md`` and ``gateway.png`` into ``output``; return them."""
    output.mkdir(parents=True, exist_ok=True)
    files = [output / "gateway.csv", output / "gateway.md", output / "gateway.png"]
    _write_csv(results, files[0])
    files[1].write_text(markdown(results))
    _draw(results, files[2])
    return files


def document(results: Results) -> dict[str, object]:
    """Return the results for ``--json``; what is no number (never, not measured) is null."""
    cells = [
        {
            "system": cell.system.name,
            "version": cell.system.version,
            "case": cell.case,
            "rounds": [
                {name: value if math.isfinite(value) else None for name, value in found.items()}
                for found in cell.rounds
            ],
        }
        for cell in results.cells
    ]
    return {
        "host": dict(results.host),
        "not_run": results.not_run,
        "failed": results.failed,
        "cells": cells,
    }


def _write_csv(results: Results, file: Path) -> None:
    with file.open("w", newline="") as sink:
        writer = csv.writer(sink, lineterminator="\n")
        writer.writerow([*_COLUMNS, *results.host])
        for cell in results.cells:
            for figure in dict.fromkeys(name for found in cell.rounds for name in found):
                values = cell.values(figure)
                numbers = [cell.median(figure), min(values), max(values)]
                row = [cell.system.name, cell.system.version, cell.case, figure]
                row += [f"{number:.6g}" for number in numbers]
                writer.writerow([*row, len(values), *results.host.values()])


def markdown(results: Results) -> str:
    """Return the report for people."""
    host = listed(results.host)
    lines = [
        "# taut bench gateway",
        "",
        f"{host}; {results.rounds} interleaved rounds, {results.seconds:g} s a load; median "
        "(lowest to highest). Rates are per CPU-second of the system's process tree, pinned to "
        "one core; mock engine and client on the others. Percentiles stand beside the direct "
        "row's and are not subtracted.",
        "",
        "| system | version | with |",
        "|---|---|---|",
    ]
    lines += [f"| {s.name} | {s.version} | {s.label} |" for s in results.systems]
    for name, reason in results.not_run.items():
        lines += ["", f"**Not run: {name}**: {reason}"]
    for line in results.failed:
        lines += ["", f"**Failed**: {line}"]
    for name in dict.fromkeys(cell.case for cell in results.cells):
        lines += ["", *_table(name, [cell for cell in results.cells if cell.case == name])]
    return "\n".join(lines) + "\n"


def _table(name: str, cells: Sequence[Cell]) -> list[str]:
    case = CASES.get(name)
    title = case.title if case else "after the start, idle"
    headline = case.headline if case else "rss_mb"
    beside = [
        figure
        for figure in _BESIDE
        if figure != headline and any(cell.values(figure) for cell in cells)
    ]
    unit = case.unit if case else "MB RSS"
    lines = [f"## {title}", "", f"| system | {unit} | {' | '.join(beside)} |"]
    lines.append("|---|" + "---:|" * (len(beside) + 1))
    for cell in cells:
        others = " | ".join(_number(cell.median(figure)) for figure in beside)
        lines.append(f"| {cell.system.name} | {_spread(cell, headline)} | {others} |")
    return lines + (_added(cells) if name == "latency" else [])


def _added(cells: Sequence[Cell]) -> list[str]:
    """Say what each gateway adds to the direct row's median; medians may be subtracted."""
    direct = [cell.median("p50_ms") for cell in cells if cell.system.name == "direct"]
    if not direct:
        return []
    added = [
        f"{cell.system.name} {cell.median('p50_ms') - direct[0]:+.2f} ms"
        for cell in cells
        if cell.system.name != "direct" and math.isfinite(cell.median("p50_ms"))
    ]
    return ["", f"Median against the direct row's: {', '.join(added)}."] if added else []


def _spread(cell: Cell, figure: str) -> str:
    values = cell.values(figure)
    if not values or math.isnan(cell.median(figure)):
        return "–"
    middle, low, high = (_number(x) for x in (cell.median(figure), min(values), max(values)))
    return f"**{middle}** ({low} to {high})"


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "never"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _draw(results: Results, file: Path) -> None:
    # Imported here: it takes half a second, and no other command draws.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name for name in _PICTURED if any(cell.case == name for cell in results.cells)]
    names = names or [IDLE]
    rows = math.ceil(len(names) / 3)
    figure = Figure(figsize=(15, 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for index, name in enumerate(names):
        case = CASES.get(name)
        headline = case.headline if case else "rss_mb"
        axes = figure.add_subplot(rows, min(3, len(names)), index + 1)
        cells = [cell for cell in results.cells if cell.case == name]
        cells = [cell for cell in cells if math.isfinite(cell.median(headline))]
        middles = [cell.median(headline) for cell in cells]
        errors = [
            [m - min(cell.values(headline)) for m, cell in zip(middles, cells, strict=True)],
            [max(cell.values(headline)) - m for m, cell in zip(middles, cells, strict=True)],
        ]
        colours = ["tab:orange" if cell.system.name == "taut" else "tab:grey" for cell in cells]
        labels = [cell.system.name for cell in cells]
        axes.barh(labels, middles, xerr=errors, color=colours)
        axes.invert_yaxis()
        axes.locator_params(axis="x", nbins=5)
        better = "higher is better" if case and case.higher_is_better else "lower is better"
        unit = case.unit if case else "MB RSS"
        axes.set_title(f"{case.title if case else 'idle'}\n{unit}, {better}", fontsize=10)
    host = results.host
    figure.suptitle(f"{host['cpu']}, {host['date']}, {results.rounds} rounds", fontsize=9)
    figure.savefig(file, dpi=110)
