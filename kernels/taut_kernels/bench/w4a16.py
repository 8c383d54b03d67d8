"""W4A16 against its rivals: ``python -m taut_kernels.bench.w4a16 --output DIR``.

Every kernel computes every M once and is held to the error budget first; what fails is reported and
not timed. Writes ``w4a16.csv``, ``w4a16.md`` with GPU, driver, versions and date, and a plot.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from taut_kernels.bench import plots, report, shapes, timing, w4a16_rivals
from taut_kernels.bench.refusal import REFUSED, first_line
from taut_kernels.bench.tune_w4a16_decode import GROUP_SIZE, SHAPES
from taut_kernels.bench.w4a16_layer import Layer, make_layer

DEFAULT_TOKENS = (1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 384, 768, 1024, 1664, 4096)
"""Some that fill no tile: a prefill has any number of tokens."""


def _prepared(
    layer: Layer, names: Sequence[str], largest: int, notes: list[str]
) -> dict[str, list[w4a16_rivals.Call]]:
    """Prepare each rival's copies of a layer; one that cannot run, or errs, leaves a note."""
    ready: dict[str, list[w4a16_rivals.Call]] = {}
    for name in names:
        dense = name == "cuBLAS"
        copy_bytes = 2 * layer.N * layer.K if dense else layer.weight_bytes()
        prepare = w4a16_rivals.PREPARE[name]
        try:
            calls = [prepare(layer)]
            y = calls[0](layer.x[:largest])
            calls += [prepare(layer) for _ in range(timing.copies_needed(copy_bytes) - 1)]
        except REFUSED as error:
            notes.append(f"{name} on {layer.N}×{layer.K}: not run: {first_line(error)}")
            continue
        if reason := w4a16_rivals.why_wrong(name, layer, y):
            notes.append(f"{name} on {layer.N}×{layer.K}: WRONG, not timed: {reason}")
            continue
        ready[name] = calls
    return ready


def _measure_shape(
    shape: str, tokens: Sequence[int], names: Sequence[str], ceiling: float, notes: list[str]
) -> list[report.Row]:
    N, K = shapes.PRODUCTS[shape]
    layer = make_layer(N, K, GROUP_SIZE, max(tokens), torch.bfloat16)
    ready = _prepared(layer, names, max(tokens), notes)
    rows = []
    notes.append(_host_note(shape, ready, layer.x[: min(tokens)]))
    for M in tokens:
        x = layer.x[:M]
        subjects = []
        for name, calls in ready.items():
            try:
                y = calls[0](x)
            except REFUSED as error:
                notes.append(f"{name} on {N}×{K}, M={M}: not run: {first_line(error)}")
                continue
            if reason := w4a16_rivals.why_wrong(name, layer, y):
                notes.append(f"{name} on {N}×{K}, M={M}: WRONG, not timed: {reason}")
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


def _host_note(shape: str, ready: dict[str, list[w4a16_rivals.Call]], x: torch.Tensor) -> str:
    costs = (
        f"{name} {timing.host_cost(lambda call=calls[0]: call(x)):.1f}"  # type: ignore[misc]
        for name, calls in ready.items()
    )
    return f"host µs a call outside a graph, {shape}, M = {x.shape[0]}: {', '.join(costs)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 where ours was wrong or did not run."""
    parser = argparse.ArgumentParser(prog="python -m taut_kernels.bench.w4a16", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    shapes.add_arguments(parser)
    parser.add_argument("--kernel", action="append", choices=sorted(w4a16_rivals.PREPARE))
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.stderr.write("error: taut_kernels.bench.w4a16 needs a CUDA device\n")
        return 2
    ceiling = timing.copy_ceiling()
    sys.stdout.write(f"copy ceiling {ceiling / 1e12:.2f} TB/s\n")
    rows: list[report.Row] = []
    notes = list(w4a16_rivals.NOT_RIVALS)
    for shape in shapes.chosen(arguments, SHAPES):
        rows += _measure_shape(
            shape,
            arguments.tokens or DEFAULT_TOKENS,
            arguments.kernel or tuple(w4a16_rivals.PREPARE),
            ceiling,
            notes,
        )
        torch.cuda.empty_cache()
        # After every shape: what was measured survives a run that is cut off.
        report.write(rows, notes, ceiling, arguments.output, "w4a16")
    for note in [*notes, plots.draw_or_say(arguments.output / "w4a16.csv")]:
        sys.stdout.write(note + "\n")
    return 1 if any(note.startswith("taut ") for note in notes) else 0


if __name__ == "__main__":
    sys.exit(main())
