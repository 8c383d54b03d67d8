"""W4A16 against its rivals: ``python -m taut_bench.w4a16 --output DIR``.

Every kernel computes every M once and is held to the error budget first; what fails is reported and
not timed. Writes ``w4a16.csv``, ``w4a16.md`` with GPU, driver, versions and date, and a plot; for
another format than symmetric groups of 128 in bf16 ``w4a16-<format>.csv`` and so on. A rival that
does not take a format is a note there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from taut_bench import cuda_device, plots, report, shapes, w4a16_format, w4a16_rivals
from taut_bench.w4a16_format import DTYPES, Format
from taut_kernels.tuner import timing
from taut_kernels.tuner.refusal import REFUSED, first_line
from taut_kernels.tuner.w4a16_layer import Layer, make_layer
from taut_kernels.tuner.w4a16_stock import OtherFormatError, Prepared

DEFAULT_TOKENS = (1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 384, 768, 1024, 1664, 4096)
"""Some that fill no tile: a prefill has any number of tokens."""


def _first(
    prepare: Callable[[Layer], Prepared], layer: Layer, M: int, count: int
) -> tuple[list[Prepared], Tensor]:
    """Prepare ``count`` copies of a layer; return their calls and the first one's result."""
    calls = [prepare(layer)]
    y = calls[0](layer.x[:M])
    return calls + [prepare(layer) for _ in range(count - 1)], y


def _again(calls: list[Prepared], x: Tensor) -> tuple[list[Prepared], Tensor]:
    return calls, calls[0](x)


def _right(
    name: str,
    where: str,
    layer: Layer,
    notes: list[str],
    attempt: Callable[[], tuple[list[Prepared], Tensor]],
) -> list[Prepared]:
    """Return a kernel's calls where their result is right; else leave a note, and none."""
    try:
        calls, y = attempt()
    except OtherFormatError as error:
        notes.append(f"{name} on {where}: no row: {first_line(error)}")
        return []
    except REFUSED as error:
        notes.append(f"{name} on {where}: not run: {first_line(error)}")
        return []
    if reason := w4a16_rivals.why_wrong(name, layer, y):
        notes.append(f"{name} on {where}: WRONG, not timed: {reason}")
        return []
    return calls


def _prepared(
    layer: Layer, names: Sequence[str], largest: int, notes: list[str]
) -> dict[str, list[Prepared]]:
    """Prepare each rival's copies of a layer; one that cannot run, or errs, leaves a note."""
    ready: dict[str, list[Prepared]] = {}
    for name in names:
        dense = name == "cuBLAS"
        copy_bytes = 2 * layer.N * layer.K if dense else layer.weight_bytes()
        prepare = w4a16_rivals.PREPARE[name]
        count = timing.copies_needed(copy_bytes)
        attempt = partial(_first, prepare, layer, largest, count)
        if calls := _right(name, f"{layer.N}×{layer.K}", layer, notes, attempt):
            ready[name] = calls
    return ready


def _measure_shape(
    shape: str,
    given: Format,
    tokens: Sequence[int],
    names: Sequence[str],
    ceiling: float,
    notes: list[str],
) -> list[report.Row]:
    N, K = shapes.PRODUCTS[shape]
    dtype = DTYPES[given.dtype]
    layer = make_layer(N, K, given.group_size, max(tokens), dtype, zero_points=given.zero_points)
    ready = _prepared(layer, names, max(tokens), notes)
    rows = []
    notes.append(_host_note(shape, ready, layer.x[: min(tokens)]))
    for M in tokens:
        x = layer.x[:M]
        subjects = []
        for name, calls in ready.items():
            attempt = partial(_again, calls, x)
            if not _right(name, f"{N}×{K}, M={M}", layer, notes, attempt):
                continue
            subjects.append(w4a16_rivals.subject(name, calls, x))
        timings = timing.measure(subjects) if M <= 256 else timing.measure(subjects, 12, 8)
        for subject, time in zip(subjects, timings, strict=True):
            rows.append(
                report.Row(shape, N, K, M, subject.name, time, layer.weight_bytes(), ceiling)
            )
            sys.stdout.write(rows[-1].line() + "\n")
        sys.stdout.flush()
    return rows


def _host_note(shape: str, ready: dict[str, list[Prepared]], x: Tensor) -> str:
    costs = (
        f"{name} {timing.host_cost(lambda call=calls[0]: call(x)):.1f}"  # type: ignore[misc]
        for name, calls in ready.items()
    )
    return f"host µs a call outside a graph, {shape}, M = {x.shape[0]}: {', '.join(costs)}"


def _measure(
    given: Format, products: Sequence[str], ceiling: float, arguments: argparse.Namespace
) -> list[str]:
    """Measure and write one format; return the notes."""
    rows: list[report.Row] = []
    notes = list(w4a16_rivals.NOT_RIVALS)
    for shape in products:
        rows += _measure_shape(
            shape,
            given,
            arguments.tokens or DEFAULT_TOKENS,
            arguments.kernel or tuple(w4a16_rivals.PREPARE),
            ceiling,
            notes,
        )
        torch.cuda.empty_cache()
        # After every shape: what was measured survives a run that is cut off.
        w4a16_format.write(rows, notes, ceiling, arguments.output, given)
    drawn = plots.draw_or_say(arguments.output / f"{given.file_name}.csv")
    sys.stdout.writelines(f"{note}\n" for note in [*notes, drawn])
    return notes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 where ours was wrong or did not run."""
    parser = argparse.ArgumentParser(prog="python -m taut_bench.w4a16", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    shapes.add_arguments(parser)
    w4a16_format.add_arguments(parser)
    parser.add_argument("--kernel", action="append", choices=sorted(w4a16_rivals.PREPARE))
    arguments = parser.parse_args(argv)
    products = shapes.chosen(arguments, shapes.LLAMA3_8B_PRODUCTS | shapes.SQUARE)
    try:
        formats = w4a16_format.chosen(arguments, products)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if cuda_device.missing("taut_bench.w4a16"):
        return 2
    ceiling = timing.copy_ceiling()
    sys.stdout.write(f"copy ceiling {ceiling / 1e12:.2f} TB/s\n")
    notes: list[str] = []
    for given in formats:
        if given != w4a16_format.DEFAULT:
            sys.stdout.write(f"format {given.name}\n")
        notes += _measure(given, list(products), ceiling, arguments)
    return 1 if any(note.startswith("taut ") for note in notes) else 0


if __name__ == "__main__":
    sys.exit(main())
