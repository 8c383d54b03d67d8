"""CSV and Markdown of a benchmark, with everything that made the figures."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from taut_kernels.tuner.timing import Timing

_PACKAGES = ("torch", "triton", "vllm", "taut")
_RIVALS = (
    *("humming-kernels", "gemlite", "quack-kernels", "lmdeploy", "flashinfer-python"),
    *("deep-gemm", "liger-kernel"),
)
"""Told where they are installed: a report says of the others that they were not run."""
_COLUMNS = (
    "shape N K M kernel us p20_us p80_us weight_GB_per_s share_of_copy_ceiling".split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured cell.

    Attributes:
        shape: name of the product.
        N: output features.
        K: input features.
        M: tokens.
        kernel: whose.
        timing: of one call.
        weight_bytes: quantised weights and scales of the layer.
        ceiling: copy rate of the card, bytes read and written a second.
    """

    shape: str
    N: int
    K: int
    M: int
    kernel: str
    timing: Timing
    weight_bytes: int
    ceiling: float

    @property
    def rate(self) -> float:
        """Bytes of quantised weights and scales a second; a dense rival moves more for the same."""
        return self.weight_bytes / (self.timing.median * 1e-6)

    def line(self) -> str:
        """Return the row for a terminal."""
        return (
            f"{self.shape:8} M={self.M:<5}{self.kernel:12}{self.timing.median:9.2f} us "
            f"[{self.timing.p20:.2f}, {self.timing.p80:.2f}]  {self.rate / self.ceiling:6.1%}"
        )


def environment() -> dict[str, str]:
    """Return what a figure depends on: card, driver, versions, date."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    versions = {}
    for package in (*_PACKAGES, *_RIVALS):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package in _PACKAGES:
                versions[package] = "not installed as a distribution"
    return {
        "GPU": torch.cuda.get_device_name(),
        "driver": driver,
        "Python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    } | versions


def measured_with(rates: str) -> str:
    """Return the sentence a report begins with.

    Args:
        rates: of the card, in words.
    """
    facts = ", ".join(f"{key} {value}" for key, value in environment().items())
    return f"Measured with {facts}; {rates}."


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown.

    Args:
        columns: their names.
        rows: cells.
    """
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table.

    Args:
        path: of the file; its directory is made if missing.
        columns: their names.
        rows: cells.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def write(
    rows: Sequence[Row],
    notes: Sequence[str],
    ceiling: float,
    directory: Path,
    name: str,
    more: Mapping[str, str] | None = None,
) -> None:
    """Write ``<name>.csv`` and ``<name>.md``.

    Args:
        rows: every measured cell.
        notes: what was not measured, and why.
        ceiling: copy rate of the card, bytes a second.
        directory: made if missing.
        name: of the files.
        more: last columns of the CSV, and what every row has there.

    Raises:
        OSError: they cannot be written.
    """
    more = more or {}
    cells = ([*_cells(row), *more.values()] for row in rows)
    write_csv(directory / f"{name}.csv", [*_COLUMNS, *more], cells)
    text = _markdown(rows, notes, ceiling)
    (directory / f"{name}.md").write_text(text, encoding="utf-8")


def _cells(row: Row) -> tuple[object, ...]:
    time = row.timing
    figures = (f"{us:.3f}" for us in (time.median, time.p20, time.p80))
    rates = (f"{row.rate / 1e9:.1f}", f"{row.rate / row.ceiling:.4f}")
    return (row.shape, row.N, row.K, row.M, row.kernel, *figures, *rates)


def _markdown(rows: Sequence[Row], notes: Sequence[str], ceiling: float) -> str:
    kernels = list(dict.fromkeys(row.kernel for row in rows))
    lines = [
        measured_with(f"copy ceiling {ceiling / 1e12:.2f} TB/s"),
        "",
        "µs per call, median [p20, p80]; ratio = best rival ÷ ours (> 1: ours is faster); share = "
        "bytes of quantised weights and scales over the copy ceiling, for our best.",
        "",
        "| shape N×K | M | " + " | ".join(kernels) + " | ratio | share |",
        "|" + "---|" * (len(kernels) + 4),
    ]
    cells: dict[tuple[str, int, int, int], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row.shape, row.N, row.K, row.M), {})[row.kernel] = row
    for (shape, N, K, M), found in cells.items():
        columns = [_cell(found.get(kernel)) for kernel in kernels]
        ratio, share = _ratio(list(found.values()))
        lines.append(f"| {shape} {N}×{K} | {M} | {' | '.join(columns)} | {ratio} | {share} |")
    return "\n".join([*lines, "", *(f"- {note}" for note in notes), ""])


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    return f"{row.timing.median:.1f} [{row.timing.p20:.1f}, {row.timing.p80:.1f}]"


def _ratio(rows: Sequence[Row]) -> tuple[str, str]:
    ours = min((row for row in rows if row.kernel.startswith("taut")), key=_median, default=None)
    rival = min((row for row in rows if _is_rival(row.kernel)), key=_median, default=None)
    if ours is None or rival is None:
        return "–", "–"
    ratio = rival.timing.median / ours.timing.median
    return f"{ratio:.2f} ({rival.kernel})", f"{ours.rate / ours.ceiling:.0%}"


def _is_rival(kernel: str) -> bool:
    """Say whether a kernel does the same work: neither ours nor marked as other work."""
    return not kernel.startswith("taut") and "(other " not in kernel


def _median(row: Row) -> float:
    return row.timing.median
