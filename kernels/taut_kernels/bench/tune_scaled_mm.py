"""Find the 8-bit products' tiles on this card: ``python -m taut_kernels.bench.tune_scaled_mm``.

Candidates are compiled first, in parallel (their form does not depend on N and K), then held to the
error budget and timed at each number of tokens; the winner of each bucket is timed against the
rivals in turn, which makes a table for ``taut_kernels/tiles``. At few tokens the second kind tries
only what did best for the first: both move the same bytes through the same kernel.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from taut_kernels.bench import report, scaled_mm_rivals, timing
from taut_kernels.bench.scaled_mm_candidates import BUCKETS, candidates
from taut_kernels.bench.scaled_mm_layer import KINDS, OUT_DTYPE, SHAPES, Layer, make_layer
from taut_kernels.bench.shapes import PRODUCTS
from taut_kernels.gemm._scaled_mm_launch import launch, make_arrivals
from taut_kernels.tiles_scaled_mm import ScaledMmTile

VLLM = "CUTLASS"
"""The kernel vLLM itself runs on Hopper."""
RIVALS = (VLLM, "_scaled_mm rows", "_scaled_mm tensor", "_int_mm")
_KEPT = 8
"""Tiles of a cell the second kind tries."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One timed candidate; ``us`` is microseconds a call."""

    kind: str
    shape: str
    M: int
    us: float
    tile: ScaledMmTile


def _compile(job: tuple[str, ScaledMmTile]) -> str | None:
    """Compile one form into Triton's cache; a line where it does not compile."""
    op, tile = job
    K = 2 * tile.block_k * tile.split_k
    dtype = torch.int8 if op == "w8a8_gemm" else torch.float8_e4m3fn
    x = torch.zeros(tile.block_m, K, dtype=torch.int8, device="cuda").view(dtype)
    weight = torch.zeros(tile.block_n, K, dtype=torch.int8, device="cuda").view(dtype)
    x_scale = torch.ones(tile.block_m, 1, device="cuda")
    w_scale = torch.ones(tile.block_n, 1, device="cuda")
    arrivals = make_arrivals(tile.block_n, x.device)
    try:
        launch(tile, x, weight, x_scale, w_scale, None, None, None, arrivals, OUT_DTYPE)
        torch.cuda.synchronize()
    except (triton.CompilationError, triton.OutOfResources, RuntimeError) as error:
        return f"{op} {tile}: {str(error).splitlines()[0]}"
    return None


class Compilers:
    """Processes that compile forms into Triton's cache; each form once."""

    def __init__(self, processes: int) -> None:
        """Start ``processes`` compilers."""
        context = multiprocessing.get_context("spawn")
        self._pool = concurrent.futures.ProcessPoolExecutor(processes, mp_context=context)
        self._done: set[tuple[str, ScaledMmTile]] = set()

    def compile(self, jobs: Iterable[tuple[str, ScaledMmTile]]) -> None:
        """Compile every new (op, tile); print what does not compile."""
        start = time.monotonic()
        new = [job for job in dict.fromkeys(jobs) if job not in self._done]
        self._done |= set(new)
        for line in self._pool.map(_compile, new):
            if line:
                sys.stdout.write(f"does not compile: {line}\n")
        sys.stdout.write(f"compiled {len(new)} forms in {time.monotonic() - start:.1f} s\n")
        sys.stdout.flush()

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown()


def _subject(
    layer: Layer, tile: ScaledMmTile, M: int, copies: list[torch.Tensor]
) -> timing.Subject:
    arrivals = [make_arrivals(layer.weight.shape[0], layer.x.device) for _ in copies]

    def call(i: int) -> torch.Tensor:
        return launch(
            tile,
            layer.x[:M],
            copies[i],
            layer.x_scale[:M],
            layer.weight_scale,
            None,
            None,
            None,
            arrivals[i],
            OUT_DTYPE,
        )

    return timing.Subject(str(tile), call, len(copies))


def _time(
    layer: Layer, M: int, tiles: Iterable[ScaledMmTile], copies: list[torch.Tensor], where: str
) -> dict[ScaledMmTile, float]:
    """Time the tiles that are right, one after the other; in turn where the card's power limits."""
    right: dict[ScaledMmTile, timing.Subject] = {}
    for tile in tiles:
        subject = _subject(layer, tile, M, copies)
        try:
            y = subject.call(0)
        except (triton.CompilationError, triton.OutOfResources, RuntimeError) as error:
            sys.stdout.write(f"{where} {tile}: {str(error).splitlines()[0]}\n")
            continue
        assert isinstance(y, torch.Tensor)
        if reason := layer.why_wrong(y):
            sys.stdout.write(f"WRONG {where} {tile}: {reason}\n")
            continue
        right[tile] = subject
    if M > 256:
        timings = timing.measure(list(right.values()), 8, 6)
    else:
        timings = [timing.measure([subject], 12, 32)[0] for subject in right.values()]
    return {tile: time.median for tile, time in zip(right, timings, strict=True)}


def _bucket_times(
    layer: Layer,
    Ms: Sequence[int],
    tiles: Sequence[ScaledMmTile],
    copies: list[torch.Tensor],
    where: str,
) -> dict[ScaledMmTile, list[float]]:
    """Return µs at each M of a bucket for the tiles that ran at all of them, best sum first."""
    times = [_time(layer, M, tiles, copies, f"{where} M={M}") for M in Ms]
    complete = {
        tile: [found[tile] for found in times]
        for tile in times[0]
        if all(tile in found for found in times)
    }
    return dict(sorted(complete.items(), key=lambda item: sum(item[1])))


def _against_rivals(
    layer: Layer, tile: ScaledMmTile, M: int, copies: list[torch.Tensor], notes: list[str]
) -> tuple[float, dict[str, float]]:
    """Return our µs and each rival's, timed in turn."""
    ready = scaled_mm_rivals.prepare_all(layer, list(RIVALS), copies, notes)
    rivals = scaled_mm_rivals.checked_subjects(layer, ready, M, notes)
    replays, calls = (30, 64) if M <= 256 else (10, 8)
    ours, *theirs = timing.measure([_subject(layer, tile, M, copies), *rivals], replays, calls)
    return ours.median, {r.name: t.median for r, t in zip(rivals, theirs, strict=True)}


Cell = tuple[str, tuple[int, ...]]
"""Shape, and the numbers of tokens of one bucket."""
Times = dict[ScaledMmTile, list[float]]


class Tuning:
    """One run: what was found, by cell; writes after every shape.

    Args:
        output: directory for the results.
        top: rows printed for each bucket.
        shapes: names in :data:`taut_kernels.bench.shapes.PRODUCTS`.
        buckets: as :data:`BUCKETS`.
        early: try early starts, too.
    """

    def __init__(
        self,
        output: Path,
        top: int,
        shapes: Sequence[str],
        buckets: Sequence[tuple[int | None, tuple[int, ...]]],
        early: bool = False,
    ) -> None:
        """Start with nothing found."""
        self.early = early
        self.output, self.top = output, top
        self.shapes, self.buckets = shapes, buckets
        self.results: list[Result] = []
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def cells(self) -> list[Cell]:
        """Return every shape with every bucket's numbers of tokens."""
        return [(shape, Ms) for shape in self.shapes for _, Ms in self.buckets]

    def time_all(self, kind: str, tiles: dict[Cell, list[ScaledMmTile]]) -> dict[Cell, Times]:
        """Time each cell's tiles; the best come first."""
        found: dict[Cell, Times] = {}
        for shape in self.shapes:
            layer, copies = self._operands(kind, shape)
            for _, Ms in self.buckets:
                where = f"{kind} {shape}"
                found[shape, Ms] = _bucket_times(layer, Ms, tiles[shape, Ms], copies, where)
        return found

    def conclude(self, kind: str, found: dict[Cell, Times]) -> None:
        """Time each cell's best tile against the rivals, and write the table."""
        for shape in self.shapes:
            layer, copies = self._operands(kind, shape)
            for max_m, Ms in self.buckets:
                self._record(kind, shape, layer, copies, max_m, Ms, found[shape, Ms])
            self.write()

    def _operands(self, kind: str, shape: str) -> tuple[Layer, list[torch.Tensor]]:
        torch.cuda.empty_cache()
        most = max(M for _, Ms in self.buckets for M in Ms)
        layer = make_layer(KINDS[kind], *PRODUCTS[shape], most)
        count = timing.copies_needed(layer.weight_bytes())
        return layer, [layer.weight.clone() for _ in range(count)]

    def _record(
        self,
        kind: str,
        shape: str,
        layer: Layer,
        copies: list[torch.Tensor],
        max_m: int | None,
        Ms: Sequence[int],
        found: Times,
    ) -> None:
        for tile, times in found.items():
            self.results += [
                Result(kind, shape, M, us, tile) for M, us in zip(Ms, times, strict=True)
            ]
        for tile, times in list(found.items())[: self.top]:
            shown = " ".join(f"{us:8.2f}" for us in times)
            sys.stdout.write(f"{kind:5}{shape:8} M={Ms} {shown}  {dataclasses.astuple(tile)}\n")
        if not found:
            return
        best = next(iter(found))
        N, K = PRODUCTS[shape]
        timed = [_against_rivals(layer, best, M, copies, self.notes) for M in Ms]
        for M, (ours, rivals) in zip(Ms, timed, strict=True):
            shown = "  ".join(f"{name} {us:.2f} ({us / ours:.3f})" for name, us in rivals.items())
            sys.stdout.write(f"{kind:5}{shape:8} M={M:<5} ours {ours:8.2f}  {shown}\n")
        self.rows.append(
            {
                "op": KINDS[kind],
                "N": N,
                "K": K,
                "max_m": max_m,
                "tile": dataclasses.asdict(best),
                "M": list(Ms),
                "us": [round(ours, 3) for ours, _ in timed],
                "vllm_us": [round(rivals.get(VLLM, 0.0), 3) for _, rivals in timed],
                "rival_us": [round(min(rivals.values(), default=0.0), 3) for _, rivals in timed],
            }
        )

    def write(self) -> None:
        """Write the table and every result so far."""
        self.output.mkdir(parents=True, exist_ok=True)
        source = "python -m taut_kernels.bench.tune_scaled_mm, " + ", ".join(
            f"{key} {value}" for key, value in report.environment().items()
        )
        table = {"gpu": torch.cuda.get_device_name(), "source": source, "rows": self.rows}
        everything = [dataclasses.asdict(result) for result in self.results]
        for name, document in (("table.json", table), ("all.json", everything)):
            text = json.dumps(document, indent=1) + "\n"
            (self.output / name).write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m taut_kernels.bench.tune_scaled_mm")
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--kind", action="append", choices=sorted(KINDS))
    parser.add_argument("--shape", action="append", choices=sorted(PRODUCTS))
    parser.add_argument("--tokens", type=int, action="append", help="only buckets with this M")
    parser.add_argument("--processes", type=int, default=15, help="compilers beside each other")
    parser.add_argument(
        "--early",
        action="store_true",
        help="try early starts: not for a table behind vLLM's kernels",
    )
    parser.add_argument("--top", type=int, default=4, help="rows printed for each bucket")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.stderr.write("error: taut_kernels.bench.tune_scaled_mm needs a CUDA device\n")
        return 2
    buckets = [
        (max_m, Ms)
        for max_m, Ms in BUCKETS
        if not arguments.tokens or set(Ms) & set(arguments.tokens)
    ]
    kinds, shapes = arguments.kind or list(KINDS), arguments.shape or list(SHAPES)
    tuning = Tuning(arguments.output, arguments.top, shapes, buckets, arguments.early)
    compilers = Compilers(arguments.processes)
    kept: dict[Cell, list[ScaledMmTile]] = {}
    for kind in kinds:
        found = _search(kind, tuning, compilers, kept)
        kept = {cell: list(times)[:_KEPT] for cell, times in found.items()}
        tuning.conclude(kind, found)
    compilers.close()
    for note in dict.fromkeys(tuning.notes):
        sys.stdout.write(note + "\n")
    return 0


def _search(
    kind: str, tuning: Tuning, compilers: Compilers, kept: dict[Cell, list[ScaledMmTile]]
) -> dict[Cell, Times]:
    """Time the candidates; at few tokens only what did best for the kind before."""
    op = KINDS[kind]
    tiles = {
        (shape, Ms): list(
            dict.fromkeys(
                candidates(*PRODUCTS[shape], Ms[-1], early=tuning.early, fp8=op == KINDS["fp8"])
            )
        )
        for shape, Ms in tuning.cells()
    }
    # Where bytes count, what did best for one kind does for the other.
    tiles |= {cell: some for cell, some in kept.items() if cell[1][-1] <= 64}
    compilers.compile((op, tile) for some in tiles.values() for tile in some)
    return tuning.time_all(kind, tiles)


if __name__ == "__main__":
    sys.exit(main())
