"""Fused norm, activation and RoPE ops against their rivals: ``python -m taut_bench.fused``.

Every kernel is held to the error budget first; what fails is reported and not timed. Operands and
results rotate through 256 MB, in at most 64 copies: calls of few tokens find their operands in L2
unless it was just flushed, as they do in serving. Writes ``fused.csv``, ``fused.md`` and a plot.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from taut_bench import cuda_device, fused_report, plots, shapes
from taut_bench.fused_cases import FORMS, Form, Operands, bytes_moved, make_operands, why_wrong
from taut_bench.fused_rivals import PREPARE
from taut_kernels.tuner import timing
from taut_kernels.tuner.refusal import REFUSED, first_line

MODELS = {"8b": shapes.MODELS["llama3-8b"], "70b": shapes.MODELS["llama3-70b"]} | shapes.MODELS
DEFAULT_MODELS = ("8b", "70b")
DEFAULT_TOKENS = (1, 16, 64, 256, 4096, 8192)
_MOST_COPIES = 64


def copies_of(form: Form, N: int, M: int) -> list[Operands]:
    """Draw as many copies of the operands as one graph rotates through."""
    count = min(_MOST_COPIES, timing.copies_needed(bytes_moved(form, N, M)))
    return [make_operands(form, N, M, seed) for seed in range(count)]


@functools.cache
def _why_wrong(name: str, N: int, kernel: str) -> str | None:
    return why_wrong(FORMS[name], N, PREPARE[kernel])


def widths_of(name: str, widths: Sequence[int] | None, models: Sequence[str]) -> list[int]:
    """Return the widths to run a form at: those asked for, or those of the models.

    Args:
        name: a key of `FORMS`.
        widths: N, or None.
        models: keys of `MODELS`.
    """
    named = [FORMS[name].width(MODELS[model]) for model in models]
    return list(widths or dict.fromkeys(named))


def _subjects(
    name: str, N: int, M: int, kernels: Sequence[str], notes: list[str]
) -> list[timing.Subject]:
    form = FORMS[name]
    copies = copies_of(form, N, M)
    subjects = []
    for kernel in kernels:
        prepare = PREPARE[kernel]
        try:
            if reason := _why_wrong(name, N, kernel):
                notes.append(f"{kernel} {name} N={N}: WRONG, not timed: {reason}")
                continue
            call = prepare(form, copies)
        except REFUSED as error:
            notes.append(f"{kernel} {name} N={N}: not run: {first_line(error)}")
            continue
        subjects.append(timing.Subject(kernel, call, len(copies)))
    subjects.append(timing.copy_subject(bytes_moved(form, N, M), len(copies)))
    return subjects


def host_cost(name: str, kernel: str) -> float:
    """Measure what one call costs the host, in µs: M = 1, many calls, no graph.

    Args:
        name: a key of `FORMS`.
        kernel: a key of `PREPARE`.
    """
    form = FORMS[name]
    call = PREPARE[kernel](form, [make_operands(form, form.width(MODELS["8b"]), 1)])
    return timing.host_cost(lambda: call(0))


def _host_notes(names: Sequence[str], kernels: Sequence[str], notes: list[str]) -> None:
    for name in names:
        costs = []
        for kernel in kernels:
            try:
                costs.append(f"{kernel} {host_cost(name, kernel):.1f}")
            except REFUSED:
                continue  # said where it was to be timed
        notes.append(f"host µs a call, {name}, M = 1: " + ", ".join(costs))


_MODELS_HELP = f"some of {', '.join(MODELS)}; default: {', '.join(DEFAULT_MODELS)}"


def _models(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in MODELS:
            raise argparse.ArgumentTypeError(f"{name!r}: use {_MODELS_HELP}")
    return names


def parser_of(program: str, description: str | None) -> argparse.ArgumentParser:
    """Return the options that the benchmark and the tuner share: what is measured, and where to.

    Args:
        program: the command, for its help.
        description: likewise.
    """
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--form", action="append", choices=sorted(FORMS))
    parser.add_argument("--width", type=int, action="append", help="N, instead of a model's")
    parser.add_argument(
        "--model", "--shapes", action="extend", type=_models, metavar="MODEL,…", help=_MODELS_HELP
    )
    parser.add_argument("--tokens", type=shapes.token_counts, action="extend", metavar="M,…")
    return parser


def asked_for(arguments: argparse.Namespace) -> tuple[dict[str, list[int]], Sequence[int]]:
    """Return the widths of each form and the numbers of tokens that a command line asks for."""
    widths = {
        name: widths_of(name, arguments.width, arguments.model or DEFAULT_MODELS)
        for name in arguments.form or list(FORMS)
    }
    return widths, arguments.tokens or DEFAULT_TOKENS


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("python -m taut_bench.fused", __doc__)
    parser.add_argument("--kernel", action="append", choices=sorted(PREPARE))
    parser.add_argument("--replays", type=int, default=timing.REPLAYS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 where ours was wrong or did not run."""
    arguments = _parser().parse_args(argv)
    if cuda_device.missing("taut_bench.fused"):
        return 2
    widths, tokens = asked_for(arguments)
    names = list(widths)
    # Every shape is a recompilation of one function; past the limit Dynamo would run it eagerly.
    torch._dynamo.config.recompile_limit = 256
    ceiling = timing.copy_ceiling()
    sys.stdout.write(f"copy ceiling {ceiling / 1e12:.2f} TB/s\n")
    kernels = arguments.kernel or list(PREPARE)
    rows: list[fused_report.Row] = []
    notes: list[str] = []
    for name in names:
        for N in widths[name]:
            for M in tokens:
                subjects = _subjects(name, N, M, kernels, notes)
                moved = bytes_moved(FORMS[name], N, M)
                times = timing.measure(subjects, arguments.replays)
                for subject, found in zip(subjects, times, strict=True):
                    row = fused_report.Row(name, N, M, subject.name, found, moved, ceiling)
                    rows.append(row)
                    sys.stdout.write(row.line() + "\n")
                sys.stdout.flush()
                # What was measured survives a run that is cut off.
                fused_report.write(rows, list(dict.fromkeys(notes)), ceiling, arguments.output)
    _host_notes(names, [kernel for kernel in kernels if kernel != "torch.compile"], notes)
    notes = list(dict.fromkeys(notes))
    fused_report.write(rows, notes, ceiling, arguments.output)
    for note in [*notes, plots.draw_or_say(arguments.output / "fused.csv")]:
        sys.stdout.write(note + "\n")
    return 1 if any(note.startswith("taut ") for note in notes) else 0


if __name__ == "__main__":
    sys.exit(main())
