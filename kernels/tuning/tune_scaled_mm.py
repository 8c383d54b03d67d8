"""Find the 8-bit products' tiles on this card: ``python -m tuning.tune_scaled_mm``.

Candidates are compiled first, in parallel (their form does not depend on N and K), then held to the
error budget and timed at each number of tokens; the best of each bucket are timed against the
tile that ships and the rivals in turn, which makes a table for ``taut_kernels/tiles``. At few
tokens the second kind tries only what did best for the first: both move the same bytes through the
same kernel. Block-wise FP8 has a kernel, candidates and rivals of its own and runs with
``--kind fp8-block`` only.

Written after every bucket: ``table.json`` (products whose every bucket was timed), ``finals.csv``
(ours and the rivals in turn) and ``all.json`` (every candidate). What fails is a line of the log.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from taut_bench import cuda_device, scaled_mm_rivals, shapes
from taut_bench.scaled_mm import PREPARE
from taut_bench.scaled_mm_layer import (
    ALL_KINDS,
    BLOCK_KIND,
    KINDS,
    SHAPES,
    Layer,
    make_layer,
)
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm.dispatch import make_arrivals
from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile
from taut_kernels.launch.launcher import gpu_name
from taut_kernels.tuner import timing
from taut_kernels.tuner.refusal import REFUSED, first_line
from tuning.scaled_mm_candidates import BUCKETS
from tuning.scaled_mm_compile import Compilers, launch_product, say
from tuning.scaled_mm_plan import FEW_TOKENS, Bucket, Tiles, borrows, first_jobs, plan_of
from tuning.scaled_mm_results import Final, Results

VLLM = "CUTLASS"
"""The kernel vLLM itself runs on Hopper; of block-wise FP8 where it has no DeepGEMM."""
RIVALS = (VLLM, "_scaled_mm rows", "_scaled_mm tensor", "_int_mm")
BLOCK_RIVALS = (VLLM, "cuBLAS blocks")
"""DeepGEMM compiles for seconds at most numbers of tokens: `bench.scaled_mm` times it."""
KNOWN = "try only tiles that won on a measured shape, with K split otherwise; look less long"
_BYTES_PER_US, _OPERATIONS_PER_US = 4.2e6, 1.5e9

Copies = list[Tensor]
Times = dict[ScaledMmTile, list[float]]
"""Microseconds at each number of tokens of a bucket."""


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """How long to look.

    Attributes:
        search: replays of a candidate.
        final: replays beside the rivals; a third of them beyond 256 tokens.
        graph_us: least length of a graph, about.
        kept: tiles of a cell the second kind tries at few tokens.
    """

    search: int
    final: int
    graph_us: float
    kept: int


FULL, QUICK = Effort(12, 30, 1500, 8), Effort(3, 12, 800, 4)


class Tuning:
    """One run: times what it is given, and writes after every bucket.

    Args:
        results: where everything goes.
        effort: how long to look.
        top: rows printed for each bucket.
        deadline: of :func:`time.monotonic`; no bucket starts after it.
    """

    def __init__(self, results: Results, effort: Effort, top: int, deadline: float) -> None:
        self.results, self.effort, self.top, self.deadline = results, effort, top, deadline

    def product(self, kind: str, shape: str, tiles: Mapping[Bucket, list[ScaledMmTile]]) -> None:
        """Tune one product, bucket by bucket.

        Args:
            kind: of :data:`ALL_KINDS`.
            shape: of :data:`taut_bench.shapes.PRODUCTS`.
            tiles: candidates, by bucket.
        """
        if time.monotonic() > self.deadline:
            say(f"{kind} {shape}: not run: the time was over")
            return
        try:
            layer, copies = self._operands(kind, shape, tiles)
            names, notes = list(BLOCK_RIVALS if kind == BLOCK_KIND else RIVALS), self.results.notes
            ready = scaled_mm_rivals.prepare_all(layer, names, copies, notes, PREPARE[kind])
        except REFUSED as error:
            say(f"{kind} {shape}: not run: {first_line(error)}")
            return
        for bucket, some in tiles.items():
            if time.monotonic() > self.deadline:
                say(f"{kind} {shape} from {bucket[1][0]} tokens on: the time was over")
                return
            try:
                self._bucket(kind, shape, bucket, some, layer, copies, ready)
            except REFUSED as error:
                say(f"{kind} {shape} {bucket[1]}: given up: {first_line(error)}")
            self.results.write()

    def _operands(self, kind: str, shape: str, buckets: Iterable[Bucket]) -> tuple[Layer, Copies]:
        torch.cuda.empty_cache()
        most = max(M for _, Ms in buckets for M in Ms)
        layer = make_layer(ALL_KINDS[kind], *shapes.PRODUCTS[shape], most)
        count = timing.copies_needed(layer.weight_bytes())
        return layer, [layer.weight.clone() for _ in range(count)]

    def _bucket(
        self,
        kind: str,
        shape: str,
        bucket: Bucket,
        tiles: list[ScaledMmTile],
        layer: Layer,
        copies: Copies,
        ready: dict[str, list[scaled_mm_rivals.Call]],
    ) -> None:
        max_m, Ms = bucket
        shipped = _shipped(layer, Ms[-1])
        tiles = list(dict.fromkeys([*tiles, shipped]))
        times = [self._search(f"{kind} {shape}", layer, M, tiles, copies) for M in Ms]
        found = {
            tile: [at[tile] for at in times] for tile in tiles if all(tile in at for at in times)
        }
        found = dict(sorted(found.items(), key=lambda item: sum(item[1])))
        self.results.add_candidates(kind, shape, Ms, found)
        for tile, us in list(found.items())[: self.top]:
            shown = " ".join(f"{value:8.2f}" for value in us)
            say(f"{kind} {shape:22} M={Ms} {shown}  {tile}")
        if not found:
            return
        best = finalists(found)
        if shipped in found and shipped not in best:
            best.append(shipped)  # a row changes by a time beside the one it has
        finals = [self._final(layer, M, best, copies, ready) for M in Ms]
        for final in finals:
            say(f"{kind} {shape:22} {final}")
        self.results.conclude(kind, shape, max_m, finals)

    def _search(
        self, where: str, layer: Layer, M: int, tiles: Iterable[ScaledMmTile], copies: Copies
    ) -> dict[ScaledMmTile, float]:
        """Time the tiles that are right, one after the other; in turn where power limits."""
        right: dict[ScaledMmTile, timing.Subject] = {}
        for tile in tiles:
            subject = _subject(layer, tile, M, copies)
            try:
                y = subject.call(0)
                assert isinstance(y, Tensor)
                if reason := layer.why_wrong(y):
                    say(f"WRONG {where} M={M} {tile}: {reason}")
                    continue
            except REFUSED as error:
                say(f"{where} M={M} {tile}: {first_line(error)}")
                continue
            right[tile] = subject
        calls = self._calls(layer, M)
        if M > 256:
            timings = timing.measure(list(right.values()), self.effort.search, calls)
        else:
            timings = [
                timing.measure([subject], self.effort.search, calls)[0]
                for subject in right.values()
            ]
        return {tile: time.median for tile, time in zip(right, timings, strict=True)}

    def _final(
        self,
        layer: Layer,
        M: int,
        tiles: Sequence[ScaledMmTile],
        copies: Copies,
        ready: dict[str, list[scaled_mm_rivals.Call]],
    ) -> Final:
        """Time some tiles and the rivals in turn."""
        ours = [_subject(layer, tile, M, copies) for tile in tiles]
        rivals = scaled_mm_rivals.checked_subjects(layer, ready, M, self.results.notes)
        replays = self.effort.final if M <= 256 else -(-self.effort.final // 3)
        times = timing.measure([*ours, *rivals], replays, self._calls(layer, M))
        return Final(
            M,
            dict(zip(tiles, times, strict=False)),
            {rival.name: t for rival, t in zip(rivals, times[len(ours) :], strict=True)},
        )

    def _calls(self, layer: Layer, M: int) -> int:
        """Return the calls of a graph that is long enough."""
        read, operations = layer.weight_bytes(), 2 * M * layer.weight.numel()
        us = 2 + max(read / _BYTES_PER_US, operations / _OPERATIONS_PER_US)
        return max(2, min(64, round(self.effort.graph_us / us)))


def finalists(found: Times) -> list[ScaledMmTile]:
    """Return the best two by the sum over a bucket, and the best at each of its ends.

    Args:
        found: times at each number of tokens, best sum first.
    """
    ends = range(len(next(iter(found.values()))))
    best = [min(found, key=lambda tile: found[tile][end]) for end in ends]
    return list(dict.fromkeys([*list(found)[:2], *best]))


def _shipped(layer: Layer, M: int) -> ScaledMmTile:
    """Return what the card's table, or the rule, has for a product now."""
    gpu, (N, K) = gpu_name(layer.weight.device), layer.weight.shape
    return tiles_scaled_mm.lookup(layer.op, gpu, N, K, M).tile


def _subject(layer: Layer, tile: ScaledMmTile, M: int, copies: Copies) -> timing.Subject:
    arrivals = [make_arrivals(layer.weight.shape[0], layer.x.device) for _ in copies]

    def call(i: int) -> Tensor:
        operands = (layer.x[:M], copies[i], layer.scales_of(M), layer.weight_scale)
        return launch_product(layer.op, tile, *operands, arrivals[i])

    return timing.Subject(str(tile), call, len(copies))


def run(tuning: Tuning, compilers: Compilers, plan: Tiles) -> None:
    """Tune every product of a plan, a shape after the other.

    Args:
        tuning: the run.
        compilers: for candidates that are not compiled yet.
        plan: what to try.
    """
    first_kind = next(iter(plan))[0]
    for shape in dict.fromkeys(shape for _, shape, _ in plan):
        for kind in dict.fromkeys(kind for kind, _, _ in plan):
            tiles = {
                bucket: some
                for (its_kind, its_shape, bucket), some in plan.items()
                if (its_kind, its_shape) == (kind, shape)
            }
            if borrows(kind, first_kind):
                for bucket in tiles:
                    best = tuning.results.best(first_kind, shape, bucket[1], tuning.effort.kept)
                    if best and bucket[1][-1] <= FEW_TOKENS:
                        tiles[bucket] = best
                jobs = ((ALL_KINDS[kind], tile) for some in tiles.values() for tile in some)
                compilers.compile(jobs)
            tuning.product(kind, shape, tiles)


def _import_rivals() -> None:
    """Import what takes seconds while candidates compile; a failure is noted where it is used."""
    try:
        importlib.import_module("vllm._custom_ops")
    except (*REFUSED, ImportError, AttributeError):
        return


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m tuning.tune_scaled_mm")
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    shapes.add_kind(parser, ALL_KINDS, KINDS)
    shapes.add_arguments(parser)
    parser.add_argument("--known", action="store_true", help=KNOWN)
    parser.add_argument("--seconds", type=float, help="start nothing new after so long")
    parser.add_argument("--processes", type=int, default=15, help="compilers beside each other")
    parser.add_argument(
        "--early",
        action="store_true",
        help="try early starts: not for a table behind vLLM's kernels",
    )
    parser.add_argument("--top", type=int, default=3, help="rows printed for each bucket")
    arguments = parser.parse_args(argv)
    if cuda_device.missing("tuning.tune_scaled_mm"):
        return 2
    chosen = shapes.chosen(arguments, SHAPES)
    # Two names may be of one product; a table lists it once.
    names = list({size: name for name, size in reversed(chosen.items())}.values())[::-1]
    asked = set(arguments.tokens or ())
    buckets = [bucket for bucket in BUCKETS if not asked or asked & set(bucket[1])]
    plan = plan_of(arguments.kind or list(KINDS), names, buckets, arguments.known, arguments.early)
    results = Results(arguments.output, VLLM)
    deadline = started + (arguments.seconds or float("inf"))
    tuning = Tuning(results, QUICK if arguments.known else FULL, arguments.top, deadline)
    compilers = Compilers(arguments.processes)
    importing = threading.Thread(target=_import_rivals, daemon=True)
    importing.start()
    compilers.compile(first_jobs(plan, arguments.known))
    importing.join()
    # Each capture of a graph may collect garbage: not all that was imported every time.
    gc.freeze()
    run(tuning, compilers, plan)
    compilers.close()
    results.write()
    for note in dict.fromkeys(results.notes):
        say(note)
    say(f"done after {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
