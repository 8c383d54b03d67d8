"""CSV and Markdown of a ``taut bench gateway --guard`` run."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from taut_deploy.bench.gateway_guard import LOADS, SHARE, Compared, Load
from taut_deploy.bench.rows import listed

_COLUMNS = ("load", "pair", "guard_first", "guard", "cpu_ms", "answers", "compared")


def write(found: Compared, output: Path) -> list[Path]:
    """Write ``guard.csv``, a row for each turn, and ``guard.md`` into ``output``; return them."""
    output.mkdir(parents=True, exist_ok=True)
    files = [output / "guard.csv", output / "guard.md"]
    with files[0].open("w", newline="") as sink:
        writer = csv.writer(sink, lineterminator="\n")
        writer.writerow([*_COLUMNS, *found.host])
        for load, pairs in found.pairs.items():
            for number, pair in enumerate(pairs, 1):
                for name, turn in (("off", pair.off), ("on", pair.on)):
                    row = [load, number, int(pair.on_first), name, f"{turn.cpu_ms:.6g}"]
                    row += [len(turn.latencies_ms), turn.drawn.get("compared", 0)]
                    writer.writerow([*row, *found.host.values()])
    files[1].write_text(markdown(found))
    return files


def document(found: Compared) -> dict[str, object]:
    """Return the results for ``--json``."""
    return {
        "host": dict(found.host),
        "share": SHARE,
        "loads": {load.name: _figures(found, load.name) for load in LOADS},
    }


def _figures(found: Compared, load: str) -> dict[str, object]:
    off, on, ratios = found.cpu(load)
    answered, drawn = found.drawn(load)
    cost, charged = (None if math.isnan(x) else x for x in found.comparison_ms(load))
    return {
        "cpu_ms": {"off": off, "on": on, "ratios": ratios},
        "p50_ms": dict(zip(("off", "on"), found.latency(load, 0.50), strict=True)),
        "p99_ms": dict(zip(("off", "on"), found.latency(load, 0.99), strict=True)),
        "answered_with_guard": answered,
        "drawn": drawn,
        "comparison_ms": {"measured": cost, "charged": charged},
    }


def markdown(found: Compared) -> str:
    """Return the report for people."""
    host = listed(found.host)
    pairs = len(found.pairs[LOADS[0].name])
    lines = [
        "# taut bench gateway --guard",
        "",
        f"{host}. One gateway, pinned to a core, with `guard: {{sample: {SHARE:g}}}` and without, "
        f"in turn, in both orders: {pairs} pairs of {found.seconds:g} s. CPU time is the gateway's "
        "own, all that the guard does included; its ratio is the median of the pairs' (lowest to "
        "highest). Percentiles are of all answers of all turns.",
    ]
    for load in LOADS:
        lines += ["", f"## {load.title}", "", "| figure | guard off | guard on | on ÷ off |"]
        lines += ["|---|---:|---:|---:|", *_rows(found, load)]
        answered, drawn = found.drawn(load.name)
        others = {name: count for name, count in drawn.items() if count and name != "compared"}
        compared = drawn.get("compared", 0)
        text = f"Compared: {compared:,} of {answered:,} answers"
        told = "".join(f", {count:,} {name}" for name, count in others.items())
        lines += ["", f"{text} ({compared / answered:.1%}){told}."]
        if compared:
            cost, charged = found.comparison_ms(load.name)
            lines += [f"A comparison: {cost:.2g} CPU ms more, {charged:.2g} by the guard's budget."]
    return "\n".join(lines) + "\n"


def _rows(found: Compared, load: Load) -> Iterator[str]:
    off, on, ratios = found.cpu(load.name)
    middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
    spread = f"**{middle:.3f}** ({low:.3f} to {high:.3f})"
    yield f"| CPU ms an answer | {off:.3g} | {on:.3g} | {spread} |"
    for name, share in (("p50 ms", 0.50), ("p99 ms", 0.99)):
        off, on = found.latency(load.name, share)
        yield f"| {name} | {off:.4g} | {on:.4g} | {on / off:.3f} |"
