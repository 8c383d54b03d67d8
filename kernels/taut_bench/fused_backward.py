"""Fused training ops, forward and backward: ``python -m taut_bench.fused_backward``.

The two passes are timed alone, each in a CUDA graph of its own: the forward pass without autograd,
the backward pass through it, over saved forward passes. Every provider is held to the error budget
first; what fails is reported and not timed. Beside each stands a copy kernel that moves as many
bytes. Shapes come in order of what they matter, and what ``--seconds`` leaves no time for is named
in the report. torch.compile, which takes its time to compile, runs where it is asked for. Writes
``fused_backward.csv``, ``fused_backward.md`` and a plot.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from taut_bench import cuda_device, fused_report, plots
from taut_bench.fused_backward_cases import (
    OPS,
    PROVIDERS,
    Case,
    Operands,
    Outputs,
    Run,
    make_operands,
    results,
    why_wrong,
)
from taut_kernels.tuner import timing
from taut_kernels.tuner.refusal import REFUSED, first_line

ROWS = 8192
LONG_ROWS = 4096
WIDTHS = (4096, 8192, 2048, 16384, 32768)
LONG_WIDTHS = (131072, 65536, 262144)
"""Of the softmax alone."""
_ROPE_WIDTHS = (4096, 8192)
SECONDS = 110.0
REPLAYS = 15
_GRAPH_US = 3000
"""Microseconds of calls a graph holds, more or less."""
_COPIES_BELOW = 2**30
"""Bytes a call moves from which one copy of the operands already leaves nothing in L2."""


def cases(ops: Sequence[str], widths: Sequence[int] | None) -> list[Case]:
    """Return the shapes to run, those that matter most first.

    Args:
        ops: some of `OPS`.
        widths: N, or None for all.
    """
    found = []
    for N in (*WIDTHS[:2], LONG_WIDTHS[0], *WIDTHS[2:], *LONG_WIDTHS[1:]):
        long = N in LONG_WIDTHS
        for op in OPS:
            fits = op == "softmax" if long else op != "rope" or N in _ROPE_WIDTHS
            if op in ops and fits and (widths is None or N in widths):
                found.append(Case(op, LONG_ROWS if long else ROWS, N))
    return found


def _copies(case: Case, *, backward: bool) -> list[Operands]:
    moved = case.bytes_moved(backward=backward)
    count = 1 if moved >= _COPIES_BELOW else timing.copies_needed(moved)
    return [make_operands(case, seed) for seed in range(count)]


def _forward(run: Run, copies: Sequence[Operands]) -> Callable[[int], object]:
    # Results stay alive until their copy comes round again: an output written over and over at one
    # address would never leave L2.
    kept: list[Outputs | None] = [None] * len(copies)

    def call(i: int) -> object:
        with torch.no_grad():
            kept[i] = run(copies[i])
        return kept[i]

    return call


def _backward(run: Run, copies: Sequence[Operands]) -> Callable[[int], object]:
    saved: list[Outputs] = []
    kept: list[Outputs | None] = [None] * len(copies)

    def call(i: int) -> object:
        if not saved:
            # Here, on the stream that will be captured: autograd goes back on that of the forward.
            saved.extend(run(operands) for operands in copies)
        operands = copies[i]
        kept[i] = torch.autograd.grad(
            saved[i], operands.leaves, operands.gradients, retain_graph=True
        )
        return kept[i]

    return call


def _subjects(
    case: Case, providers: Sequence[str], *, backward: bool, notes: list[str]
) -> list[timing.Subject]:
    found = []
    for name in providers:
        try:
            run = PROVIDERS[name](case.op)
            if reason := why_wrong(case, run):
                notes.append(f"{name} {case}: WRONG, not timed: {reason}")
                continue
        except REFUSED as error:
            notes.append(f"{name} {case}: not run: {first_line(error)}")
            continue
        copies = _copies(case, backward=backward)
        call = _backward(run, copies) if backward else _forward(run, copies)
        found.append(timing.Subject(name, call, len(copies)))
    moved = case.bytes_moved(backward=backward)
    copies_of_copy = 1 if moved >= _COPIES_BELOW else timing.copies_needed(moved)
    found.append(timing.copy_subject(moved, copies_of_copy))
    return found


def measure(
    case: Case, providers: Sequence[str], ceiling: float, replays: int, notes: list[str]
) -> list[fused_report.Row]:
    """Check and time both passes of each provider at one shape.

    Args:
        case: which.
        providers: keys of `PROVIDERS`.
        ceiling: copy rate of the card, bytes a second.
        replays: of each graph, in turn.
        notes: what was not run, and why, is added.

    Returns:
        A row for each pass and provider that ran, and for the copies.
    """
    rows = []
    for backward in (False, True):
        moved = case.bytes_moved(backward=backward)
        calls = max(2, min(timing.MIN_CALLS, int(_GRAPH_US * 1e-6 * ceiling / moved)))
        form = f"{case.op} {'backward' if backward else 'forward'}"
        try:
            subjects = _subjects(case, providers, backward=backward, notes=notes)
            times = timing.measure(subjects, replays, calls)
        except REFUSED as error:
            notes.append(f"{form} {case}: not run: {first_line(error)}")
            continue
        rows += [
            fused_report.Row(form, case.N, case.M, subject.name, found, moved, ceiling)
            for subject, found in zip(subjects, times, strict=True)
        ]
        del subjects
        torch.cuda.empty_cache()
    return rows


def _compile(job: tuple[str, Case]) -> str | None:
    """Compile a provider's kernels into Triton's cache; a line where that fails."""
    name, case = job
    rows = min(case.M, 1024 if case.N > 8192 else ROWS)
    try:
        results(PROVIDERS[name](case.op), make_operands(Case(case.op, rows, case.N)))
        torch.cuda.synchronize()
    except REFUSED as error:
        return f"{name} {case}: {first_line(error)}"
    return None


def compile_beforehand(jobs: Sequence[tuple[str, Case]], processes: int) -> None:
    """Compile kernels in parallel, so that the run that measures finds them in Triton's cache.

    Args:
        jobs: provider and case.
        processes: compilers beside each other.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        for line in pool.map(_compile, jobs):
            if line:
                sys.stdout.write(f"not compiled beforehand: {line}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m taut_bench.fused_backward", description=__doc__
    )
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--op", action="append", choices=OPS)
    parser.add_argument("--width", type=int, action="append", choices=(*WIDTHS, *LONG_WIDTHS))
    parser.add_argument(
        "--kernel", action="append", choices=sorted(PROVIDERS), help="default: not torch.compile"
    )
    parser.add_argument("--replays", type=int, default=REPLAYS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin no case after them")
    parser.add_argument("--processes", type=int, default=12, help="compilers beside each other")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 where ours was wrong or did not run."""
    arguments = _parser().parse_args(argv)
    if cuda_device.missing("taut_bench.fused_backward"):
        return 2
    start = time.monotonic()
    # Every shape is a recompilation of one function; past the limit Dynamo would run it eagerly.
    torch._dynamo.config.recompile_limit = 256
    providers = arguments.kernel or [name for name in PROVIDERS if name != "torch.compile"]
    wanted = cases(arguments.op or OPS, arguments.width)
    jobs = [(name, case) for case in wanted for name in providers if name in ("taut", "Liger")]
    compile_beforehand(jobs, min(arguments.processes, max(1, len(jobs))))
    ceiling = timing.copy_ceiling()
    sys.stdout.write(f"copy ceiling {ceiling / 1e12:.2f} TB/s\n")
    rows: list[fused_report.Row] = []
    notes: list[str] = []
    for case in wanted:
        if time.monotonic() - start > arguments.seconds:
            notes.append(f"{case}: not run: {arguments.seconds:.0f} s were over")
            continue
        found = measure(case, providers, ceiling, arguments.replays, notes)
        rows += found
        sys.stdout.write("".join(row.line() + "\n" for row in found))
        sys.stdout.flush()
        # What was measured survives a run that is cut off.
        fused_report.write(
            rows, list(dict.fromkeys(notes)), ceiling, arguments.output, "fused_backward"
        )
    notes = list(dict.fromkeys(notes))
    for note in [*notes, plots.draw_or_say(arguments.output / "fused_backward.csv")]:
        sys.stdout.write(note + "\n")
    return 1 if any(note.startswith("taut ") for note in notes) else 0


if __name__ == "__main__":
    sys.exit(main())
