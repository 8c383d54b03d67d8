"""Find the primitives' tiles on this card: ``python -m tuning.tune_primitives``.

Every candidate is compiled first, in parallel, then held to the error budget, then timed in turn
with the others of its shape; the best ones are timed again in turn with cuBLAS or cuDNN, and the
winners make tables for ``taut_kernels/tiles``: ``gemm`` and ``conv2d``. The
transpose's tiles are printed only: they are constants of its rungs. Rows of the shipped tables that
a run does not measure again are kept.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from taut_bench import cuda_device, report, testing
from taut_kernels.tuner import timing
from taut_kernels.tuner.refusal import REFUSED, first_line
from tuning.tune_primitives_jobs import PARTS, Job, jobs_of, kept_rows, row_of

_KEPT = 4
"""Candidates of a shape that are timed beside the rival."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One candidate of one shape, timed; ``us`` is microseconds a call, None for the rival's."""

    job: str
    us: float
    tile: str


def _compile(pair: tuple[Job, Any]) -> str | None:
    """Compile one candidate into Triton's cache; a line where it does not compile."""
    job, tile = pair
    try:
        job.warm(tile)
        torch.cuda.synchronize()
    except (triton.CompilationError, triton.OutOfResources, RuntimeError) as error:
        return f"{job.name} {tile}: {first_line(error)}"
    return None


def compile_all(jobs: Sequence[Job], processes: int) -> None:
    """Compile every form once, beside each other; print what does not compile."""
    start = time.monotonic()
    forms: dict[Any, tuple[Job, Any]] = {}
    for job in jobs:
        for tile in job.candidates:
            forms.setdefault(job.form(tile), (job, tile))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        for line in pool.map(_compile, forms.values()):
            if line:
                sys.stdout.write(f"does not compile: {line}\n")
    seconds = time.monotonic() - start
    sys.stdout.write(f"compiled {len(forms)} forms in {seconds:.1f} s\n")
    sys.stdout.flush()


def tune(job: Job) -> tuple[list[Result], dict[str, Any] | None]:
    """Check and time a job's candidates.

    Args:
        job: shape and candidates.

    Returns:
        What was timed, best first, and the winner's row of a table; None where nothing was right.
    """
    operands = job.make()
    right: dict[Any, timing.Subject] = {}
    for tile in job.candidates:
        try:
            y = operands.run(tile, 0)
        except (*REFUSED, triton.OutOfResources) as error:
            sys.stdout.write(f"{job.name} {tile}: {first_line(error)}\n")
            continue
        if reason := testing.why_outside_budget(y, operands.gold, operands.reference):
            sys.stdout.write(f"WRONG {job.name} {tile}: {reason}\n")
            continue
        right[tile] = timing.Subject(str(tile), operands.caller(tile), operands.copies)
    if not right:
        return [], None
    first = timing.measure(list(right.values()), 6, job.calls)
    ranked = sorted(zip(right, first, strict=True), key=lambda pair: pair[1].median)
    results = [Result(job.name, time.median, str(tile)) for tile, time in ranked]
    best = [tile for tile, _ in ranked[:_KEPT]]
    rival = timing.Subject("rival", operands.rival, operands.copies)
    final = timing.measure([rival, *(right[tile] for tile in best)], 12, job.calls)
    winner = min(range(len(best)), key=lambda i: final[i + 1].median)
    us, rival_us = final[winner + 1].median, final[0].median
    line = f"{job.name:34} {us:8.2f} us, rival {rival_us:8.2f}: {rival_us / us:.3f}  {best[winner]}"
    sys.stdout.write(line + "\n")
    for other in best[:winner] + best[winner + 1 :]:
        sys.stdout.write(f"{'':34} {final[best.index(other) + 1].median:8.2f}  {other}\n")
    sys.stdout.flush()
    return results, row_of(job, best[winner], us, rival_us)


def _write(document: object, path: Path) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_tables(rows: dict[str, list[dict[str, Any]]], directory: Path) -> None:
    """Write the tables found so far.

    Args:
        rows: part → rows of its table.
        directory: made if missing.

    Raises:
        OSError: they cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name()
    card = gpu.lower().removeprefix("nvidia ").replace(" ", "-")
    facts = ", ".join(f"{key} {value}" for key, value in report.environment().items())
    source = f"python -m tuning.tune_primitives, {facts}"
    for part, found in rows.items():
        table = {"gpu": gpu, "source": source, "rows": kept_rows(part, gpu, found)}
        _write(table, directory / f"{part}-{card}.json")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tuning.tune_primitives")
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--rows", type=int, action="append", help="only products of so many rows")
    parser.add_argument("--processes", type=int, default=14, help="compilers beside each other")
    arguments = parser.parse_args(argv)
    if cuda_device.missing("tuning.tune_primitives"):
        return 2
    torch.backends.cudnn.benchmark = True
    jobs = [job for part in arguments.part or PARTS for job in jobs_of(part)]
    if arguments.rows:
        jobs = [job for job in jobs if job.part != "gemm" or job.sizes[0] in arguments.rows]
    compile_all(jobs, arguments.processes)
    rows: dict[str, list[dict[str, Any]]] = {}
    results: list[Result] = []
    for job in jobs:
        found, row = tune(job)
        results += found
        if row is not None:
            rows.setdefault(job.part, []).append(row)
        # What was measured survives a run that is cut off.
        write_tables({part: some for part, some in rows.items() if some}, arguments.output)
        _write([dataclasses.asdict(one) for one in results], arguments.output / "all.json")
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
