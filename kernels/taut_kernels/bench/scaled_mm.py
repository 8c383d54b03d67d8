"""FP8 and int8 products against their rivals: ``python -m taut_kernels.bench.scaled_mm``.

Every kernel computes every M once and is held to the error budget first; what fails is reported and
not timed. Writes ``scaled_mm_<kind>.csv`` and ``.md`` with GPU, driver, versions and date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from taut_kernels.bench import report, scaled_mm_rivals, timing
from taut_kernels.bench.scaled_mm_layer import KINDS, SHAPES, make_layer

DEFAULT_TOKENS = (1, 4, 16, 32, 64, 128, 256, 1024, 4096)


def _measure_shape(
    kind: str,
    shape: str,
    tokens: Sequence[int],
    names: Sequence[str],
    ceiling: float,
    notes: list[str],
) -> list[report.Row]:
    N, K = SHAPES[shape]
    layer = make_layer(KINDS[kind], N, K, max(tokens))
    copies = [layer.weight.clone() for _ in range(timing.copies_needed(layer.weight_bytes()))]
    ready = scaled_mm_rivals.prepare_all(layer, list(names), copies, notes)
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
    """Run the command line; return the exit status: 1 where a kernel of ours was wrong."""
    parser = argparse.ArgumentParser(prog="python -m taut_kernels.bench.scaled_mm")
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--kind", action="append", choices=sorted(KINDS))
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES))
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--kernel", action="append", choices=sorted(scaled_mm_rivals.PREPARE))
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.stderr.write("error: taut_kernels.bench.scaled_mm needs a CUDA device\n")
        return 2
    ceiling = timing.copy_ceiling()
    sys.stdout.write(f"copy ceiling {ceiling / 1e12:.2f} TB/s\n")
    wrong = False
    for kind in arguments.kind or KINDS:
        rows: list[report.Row] = []
        notes: list[str] = []
        for shape in arguments.shape or SHAPES:
            rows += _measure_shape(
                kind,
                shape,
                arguments.tokens or DEFAULT_TOKENS,
                arguments.kernel or tuple(scaled_mm_rivals.PREPARE),
                ceiling,
                notes,
            )
            torch.cuda.empty_cache()
            # After every shape: what was measured survives a run that is cut off.
            report.write(rows, notes, ceiling, arguments.output, f"scaled_mm_{kind}")
        for note in notes:
            sys.stdout.write(note + "\n")
            wrong = wrong or ("WRONG" in note and note.startswith("taut"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
