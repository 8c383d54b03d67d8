"""FP8 and int8 products against their rivals: ``python -m taut_bench.scaled_mm``.

Every kernel computes every M once and is held to the error budget first; what fails is reported and
not timed. Writes ``scaled_mm_<kind>.csv``, ``.md`` with GPU, driver, versions and date, and a plot.
Block-wise FP8 has rivals of its own and runs with ``--kind fp8-block`` only. Kinds that end in
``-quantised`` have vLLM's quantisation of the activations in front of every product.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from taut_bench import (
    cuda_device,
    plots,
    report,
    scaled_mm_block_rivals,
    scaled_mm_quantised,
    scaled_mm_rivals,
    shapes,
)
from taut_bench.scaled_mm_layer import ALL_KINDS, BLOCK_KIND, KINDS, SHAPES, Layer, make_layer
from taut_kernels.tuner import timing

DEFAULT_TOKENS = (1, 4, 16, 32, 64, 128, 256, 1024, 4096)
PREPARE = dict.fromkeys(KINDS, scaled_mm_rivals.PREPARE) | {
    BLOCK_KIND: scaled_mm_block_rivals.PREPARE,
    **scaled_mm_quantised.PREPARE,
}
"""Kind → how to prepare its kernels, by name."""
_NOT_RIVALS = dict.fromkeys(KINDS, scaled_mm_rivals.NOT_RIVALS) | {
    BLOCK_KIND: scaled_mm_block_rivals.NOT_RIVALS,
    **scaled_mm_quantised.NOT_RIVALS,
}
_KERNELS = sorted({name for table in PREPARE.values() for name in table})


def _layer(kind: str, N: int, K: int, M: int) -> Layer:
    if op := scaled_mm_quantised.KINDS.get(kind):
        return scaled_mm_quantised.make_quantised_layer(op, N, K, M)
    return make_layer(ALL_KINDS[kind], N, K, M)


def _measure_shape(
    kind: str,
    shape: str,
    tokens: Sequence[int],
    names: Sequence[str],
    ceiling: float,
    notes: list[str],
) -> list[report.Row]:
    N, K = shapes.PRODUCTS[shape]
    layer = _layer(kind, N, K, max(tokens))
    copies = [layer.weight.clone() for _ in range(timing.copies_needed(layer.weight_bytes()))]
    ready = scaled_mm_rivals.prepare_all(layer, list(names), copies, notes, PREPARE[kind])
    rows = []
    for M in tokens:
        subjects = scaled_mm_rivals.checked_subjects(layer, ready, M, notes)
        timings = timing.measure(subjects) if M <= 256 else timing.measure(subjects, 12, 8)
        for subject, time in zip(subjects, timings, strict=True):
            row = report.Row(shape, N, K, M, subject.name, time, layer.weight_bytes(), ceiling)
            rows.append(row)
            sys.stdout.write(f"{kind} {row.line()}\n")
        sys.stdout.flush()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 where ours was wrong or did not run."""
    parser = argparse.ArgumentParser(prog="python -m taut_bench.scaled_mm")
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    shapes.add_kind(parser, PREPARE, KINDS)
    shapes.add_arguments(parser)
    parser.add_argument("--kernel", action="append", choices=_KERNELS)
    arguments = parser.parse_args(argv)
    if cuda_device.missing("taut_bench.scaled_mm"):
        return 2
    ceiling = timing.copy_ceiling()
    sys.stdout.write(f"copy ceiling {ceiling / 1e12:.2f} TB/s\n")
    wrong = False
    for kind in arguments.kind or KINDS:
        rows: list[report.Row] = []
        notes = list(_NOT_RIVALS[kind])
        for shape in shapes.chosen(arguments, SHAPES):
            rows += _measure_shape(
                kind,
                shape,
                arguments.tokens or DEFAULT_TOKENS,
                arguments.kernel or tuple(PREPARE[kind]),
                ceiling,
                notes,
            )
            torch.cuda.empty_cache()
            # After every shape: what was measured survives a run that is cut off.
            report.write(rows, notes, ceiling, arguments.output, f"scaled_mm_{kind}")
        plot = plots.draw_or_say(arguments.output / f"scaled_mm_{kind}.csv")
        for note in [*notes, plot]:
            sys.stdout.write(note + "\n")
            wrong = wrong or note.startswith("taut ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
