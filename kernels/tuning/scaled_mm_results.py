"""What a run of `tune_scaled_mm` found: the rows of a table, and every figure behind them."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from taut_bench import report
from taut_bench.scaled_mm_layer import ALL_KINDS
from taut_bench.shapes import PRODUCTS
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile
from taut_kernels.tuner.timing import Timing

_CLEARLY = 0.99
"""Ratio of times from which on a tile of its own is worth a bucket of its own."""
_COLUMNS = ("kind", "shape", "N", "K", "M", "kernel", "us", "p20_us", "p80_us")


@dataclasses.dataclass(frozen=True, slots=True)
class Final:
    """What was timed in turn at one number of tokens: our tiles, and rivals by name."""

    M: int
    ours: dict[ScaledMmTile, Timing]
    rivals: dict[str, Timing]

    def __str__(self) -> str:
        best = min(self.ours, key=lambda tile: self.ours[tile].median)
        us = self.ours[best].median
        theirs = "  ".join(
            f"{name} {t.median:.2f} ({t.median / us:.3f})" for name, t in self.rivals.items()
        )
        return f"M={self.M:<5} ours {us:8.2f} ({best})  {theirs}"


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A row of a table: a tile for up to ``max_m`` tokens, and the numbers measured for it."""

    max_m: int | None
    tile: ScaledMmTile
    finals: tuple[Final, ...]


def parts_of_bucket(max_m: int | None, finals: Sequence[Final], vllm: str) -> list[Part]:
    """Choose a bucket's tile, or two, where its lower end is better off with another.

    Args:
        max_m: most tokens of the bucket.
        finals: at each of its numbers of tokens, rising.
        vllm: name of the rival that runs where ours is slower.

    Returns:
        One part; two where another tile is clearly faster at the lower end, or the tile is faster
        than vLLM's at one end only. Up to 256 tokens always one.
    """
    tiles = [tile for tile in finals[0].ours if all(tile in final.ours for final in finals)]
    whole = min(tiles, key=lambda tile: sum(final.ours[tile].median for final in finals))
    if len(finals) == 1 or finals[0].M <= 256:
        return [Part(max_m, whole, tuple(finals))]
    low, high = finals[0], finals[-1]
    lower = min(low.ours, key=lambda tile: low.ours[tile].median)
    upper = min(high.ours, key=lambda tile: high.ours[tile].median)
    clearly = low.ours[lower].median < _CLEARLY * low.ours[whole].median
    clearly |= high.ours[upper].median < _CLEARLY * high.ours[whole].median
    wins = [_wins(final, whole, vllm) for final in (low, high)]
    if not clearly and wins[0] == wins[1]:
        return [Part(max_m, whole, tuple(finals))]
    # Any part of a tile costs as much as the whole one.
    last = -(-low.M // lower.block_m) * lower.block_m
    return [Part(last, lower, (low,)), Part(max_m, upper, (high,))]


def _wins(final: Final, tile: ScaledMmTile, vllm: str) -> bool:
    theirs = final.rivals.get(vllm)
    return theirs is not None and final.ours[tile].median <= theirs.median


class Results:
    """Everything a run found; :meth:`write` may be called at any time.

    Args:
        output: directory.
        vllm: name of the rival vLLM itself runs.
    """

    def __init__(self, output: Path, vllm: str) -> None:
        self.output, self.vllm = output, vllm
        self.notes: list[str] = []
        self._rows: list[dict[str, Any]] = []
        self._finals: list[tuple[str, str, Final]] = []
        self._candidates: list[dict[str, Any]] = []
        self._environment: dict[str, str] = {}
        self._best: dict[tuple[str, str, tuple[int, ...]], list[ScaledMmTile]] = {}

    def add_candidates(
        self,
        kind: str,
        shape: str,
        Ms: Sequence[int],
        found: Mapping[ScaledMmTile, Sequence[float]],
    ) -> None:
        """Keep the times of a bucket's candidates, best first.

        Args:
            kind: of :data:`ALL_KINDS`.
            shape: of :data:`PRODUCTS`.
            Ms: numbers of tokens.
            found: µs at each of them.
        """
        self._best[kind, shape, tuple(Ms)] = list(found)
        for tile, times in found.items():
            self._candidates += [
                {"kind": kind, "shape": shape, "M": M, "us": round(us, 3), "tile": str(tile)}
                for M, us in zip(Ms, times, strict=True)
            ]

    def best(self, kind: str, shape: str, Ms: Sequence[int], count: int) -> list[ScaledMmTile]:
        """Return a bucket's best candidates, none where it was not timed."""
        return self._best.get((kind, shape, tuple(Ms)), [])[:count]

    def conclude(self, kind: str, shape: str, max_m: int | None, finals: Sequence[Final]) -> None:
        """Make a bucket's rows.

        Args:
            kind: of :data:`ALL_KINDS`.
            shape: of :data:`PRODUCTS`.
            max_m: most tokens of the bucket.
            finals: at each of its numbers of tokens.
        """
        self._finals += [(kind, shape, final) for final in finals]
        for part in parts_of_bucket(max_m, finals, self.vllm):
            self._rows.append(self._row(kind, shape, part))

    def _row(self, kind: str, shape: str, part: Part) -> dict[str, Any]:
        N, K = PRODUCTS[shape]
        rivals = [{name: t.median for name, t in final.rivals.items()} for final in part.finals]
        return {
            "op": ALL_KINDS[kind],
            "N": N,
            "K": K,
            "max_m": part.max_m,
            **tiles_scaled_mm.as_fields(part.tile),
            "M": [final.M for final in part.finals],
            "us": [round(final.ours[part.tile].median, 3) for final in part.finals],
            "vllm_us": [round(found.get(self.vllm, 0.0), 3) for found in rivals],
            "rival_us": [round(min(found.values(), default=0.0), 3) for found in rivals],
        }

    def complete_rows(self) -> list[dict[str, Any]]:
        """Return the rows of products that have one for any number of tokens."""
        ended = {(r["op"], r["N"], r["K"]) for r in self._rows if r["max_m"] is None}
        return [row for row in self._rows if (row["op"], row["N"], row["K"]) in ended]

    def write(self) -> None:
        """Write the table of complete products, the final figures and every candidate's."""
        self.output.mkdir(parents=True, exist_ok=True)
        # Once: it starts a process.
        self._environment = self._environment or report.environment()
        source = "python -m tuning.tune_scaled_mm, " + ", ".join(
            f"{key} {value}" for key, value in self._environment.items()
        )
        table = {"gpu": torch.cuda.get_device_name(), "source": source}
        for name, document in (
            ("table.json", table | {"rows": self.complete_rows()}),
            ("rows.json", self._rows),
            ("all.json", self._candidates),
        ):
            text = json.dumps(document, indent=1) + "\n"
            (self.output / name).write_text(text, encoding="utf-8")
        with (self.output / "finals.csv").open("w", newline="", encoding="utf-8") as file:
            out = csv.writer(file)
            out.writerow(_COLUMNS)
            out.writerows(line for found in self._finals for line in _lines(*found))


def _lines(kind: str, shape: str, final: Final) -> list[tuple[object, ...]]:
    named = {f"taut {tile}": t for tile, t in final.ours.items()} | final.rivals
    where = (kind, shape, *PRODUCTS[shape], final.M)
    return [
        (*where, name, *(f"{value:.3f}" for value in (t.median, t.p20, t.p80)))
        for name, t in named.items()
    ]
