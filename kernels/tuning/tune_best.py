"""The fastest of what a tuner timed, small enough to be committed: ``best.csv``."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

KEPT = 12
"""Candidates of a shape and number of tokens."""
NAME = "best.csv"


def write(timed: Iterable[Mapping[str, Any]], directory: Path) -> None:
    """Write the fastest candidates of each shape and number of tokens.

    Args:
        timed: what was timed: ``shape``, ``M`` (tokens), ``us`` a call, and ``tile``, a name or its
            fields.
        directory: where ``best.csv`` goes.
    """

    def cell(row: Mapping[str, Any]) -> tuple[str, int]:
        return row["shape"], row["M"]

    with (directory / NAME).open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(("shape", "M", "us", "tile"))
        for _, rows in itertools.groupby(sorted(timed, key=cell), cell):
            for row in sorted(rows, key=lambda row: row["us"])[:KEPT]:
                out.writerow((*cell(row), f"{row['us']:.3f}", _tile(row["tile"])))


def _tile(tile: str | Mapping[str, Any]) -> str:
    if isinstance(tile, str):
        return tile
    return " ".join(f"{field}={value}" for field, value in tile.items())
