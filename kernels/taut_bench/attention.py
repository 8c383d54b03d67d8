"""Attention against its rivals: ``python -m taut_bench.attention --output DIR``.

Llama-3-8B's heads (32 query, 8 key, 128 elements), causal. Three parts: ``prefill`` (forward over a
prompt), ``backward`` (forward and backward, through autograd) and ``decode`` (one token a sequence
over a paged cache in bf16, fp8 and int8). Every kernel is held to its budget first; what fails is
reported and not timed. Calls are timed in CUDA graphs, those with gradients by events, subjects in
turn, L2 flushed between replays, caches rotated. Prefill stands beside the rate of a large cuBLAS
product, decode beside the bytes of keys and values at the copy rate, both measured in the same run.
Writes ``attention.csv`` and ``attention.md`` after each shape.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from taut_bench import cuda_device, report
from taut_bench.attention_cases import (
    PARTS,
    SHAPES,
    Cached,
    DecodeGate,
    Prompt,
    PromptGate,
    Shape,
    make_cached,
    make_prompt,
)
from taut_bench.attention_rivals import DECODE, FORWARD, STEP
from taut_bench.loss import product_rate
from taut_kernels.tuner import timing
from taut_kernels.tuner.refusal import REFUSED, first_line

REPLAYS = 15
_REPLAY_US = 6000.0
"""About how long one replay of a graph may take."""
_COLUMNS = "part B T cache kernel us p20_us p80_us rate unit share".split()  # noqa: SIM905
_KERNELS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "prefill": dict(FORWARD),
    "backward": dict(STEP),
    "decode": dict(DECODE),
}


@dataclass(frozen=True, slots=True)
class Rates:
    """What the card reaches in this run: bf16 operations and bytes copied, a second."""

    flops: float
    bytes: float

    def __str__(self) -> str:
        return f"copy {self.bytes / 1e12:.2f} TB/s, bf16 product {self.flops / 1e12:.0f} TFLOP/s"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured cell.

    Attributes:
        shape: what was run.
        kernel: whose.
        timing: of one call.
        rates: of the card.
    """

    shape: Shape
    kernel: str
    timing: timing.Timing
    rates: Rates

    @property
    def rate(self) -> float:
        """Operations a second, or bytes of keys and values."""
        decode = self.shape.part == "decode"
        work = self.shape.bytes_read() if decode else self.shape.flops()
        return work / (self.timing.median * 1e-6)

    @property
    def share(self) -> float:
        """Of what the card reaches."""
        return self.rate / (self.rates.bytes if self.shape.part == "decode" else self.rates.flops)

    def cells(self) -> list[str]:
        """Return the CSV's columns."""
        shape, time = self.shape, self.timing
        scale, unit = (1e9, "GB/s") if shape.part == "decode" else (1e12, "TFLOP/s")
        return [
            *map(str, (shape.part, shape.batch, shape.tokens, shape.cache, self.kernel)),
            *(f"{us:.3f}" for us in (time.median, time.p20, time.p80)),
            f"{self.rate / scale:.1f}",
            unit,
            f"{self.share:.4f}",
        ]


def floor_us(shape: Shape, rates: Rates) -> float:
    """Return the larger of a shape's two floors in µs."""
    return max(shape.flops() / rates.flops, shape.bytes_read() / rates.bytes) * 1e6


Gate = Callable[[Callable[[], Any], bool], str | None]
"""Runs a kernel bound to the gate's operands; returns why its result is wrong, or None."""


def _gate(part: str, operands: Any) -> Gate:
    """Return the gate of a part; ``operands`` are a decode shape's, or a `PromptGate`."""
    if part == "decode":
        decode = DecodeGate(operands)
        return lambda call, ours: decode.why_wrong(call(), ours)
    prompt: PromptGate = operands
    if part == "prefill":
        return lambda call, ours: prompt.why_wrong(call(), None, ours)

    def judge(call: Callable[[], Any], ours: bool) -> str | None:
        o, gradients = call()
        return prompt.why_wrong(o.detach(), gradients, ours)

    return judge


def _refusals(kernel: str) -> tuple[type[BaseException], ...]:
    """Return what says that a kernel cannot run; another vLLM may lack a name we ask it for."""
    return REFUSED if kernel == "taut" else (*REFUSED, AttributeError, ImportError)


def _right_kernels(
    part: str, kernels: Sequence[str], operands: Any, gate: Gate, where: str, notes: list[str]
) -> list[str]:
    """Return those whose results pass; the others leave a note."""
    passed = []
    for kernel in kernels:
        try:
            reason = gate(_KERNELS[part][kernel](operands), kernel == "taut")
        except _refusals(kernel) as error:
            notes.append(f"{kernel}, {where}: not run: {first_line(error)}")
            continue
        if reason:
            notes.append(f"{kernel}, {where}: WRONG, not timed: {reason}")
        else:
            passed.append(kernel)
    return passed


def _right_at_all(part: str, kernels: Sequence[str], notes: list[str]) -> list[str]:
    check = PromptGate()
    where = f"{part} of {check.prompt.q.shape[1]} tokens"
    return _right_kernels(part, kernels, check.prompt, _gate(part, check), where, notes)


def _subject(part: str, kernel: str, copies: Sequence[Any]) -> timing.Subject:
    calls = [_KERNELS[part][kernel](operands) for operands in copies]
    return timing.Subject(kernel, lambda i: calls[i](), len(calls))


def run_shape(shape: Shape, kernels: Sequence[str], rates: Rates, notes: list[str]) -> list[Row]:
    """Time kernels that are known to be right at one shape.

    Args:
        shape: which.
        kernels: names.
        rates: of the card.
        notes: what was not run, and why, is added.

    Returns:
        A row for each kernel that ran.
    """
    copies: list[Cached] | list[Prompt]
    if shape.part == "decode":
        copies = [make_cached(shape) for _ in range(_copies(shape))]
        gate = _gate(shape.part, copies[0])
        kernels = _right_kernels(shape.part, kernels, copies[0], gate, str(shape), notes)
    else:
        copies = [make_prompt(shape.tokens) for _ in range(2)]
    subjects = []
    floor = floor_us(shape, rates)
    for kernel in kernels:
        try:
            subject = _subject(shape.part, kernel, copies)
            subject.call(0)
            torch.cuda.synchronize()
        except _refusals(kernel) as error:
            notes.append(f"{kernel}, {shape}: not run: {first_line(error)}")
            continue
        subjects.append(subject)
    if shape.part == "backward":
        timings = timing.measure_eager(subjects, REPLAYS)
    else:
        calls = max(2, min(timing.MIN_CALLS, int(_REPLAY_US / floor)))
        subjects = _capturable(subjects, str(shape), notes)
        timings = timing.measure(subjects, REPLAYS, calls)
    return [Row(shape, s.name, t, rates) for s, t in zip(subjects, timings, strict=True)]


def _capturable(
    subjects: Sequence[timing.Subject], where: str, notes: list[str]
) -> list[timing.Subject]:
    """Return the subjects a CUDA graph can hold; the others leave a note, but ours an error."""
    good = []
    for subject in subjects:
        try:
            timing.capture(subject, 1)
        except REFUSED as error:
            if subject.name.startswith("taut"):
                raise
            notes.append(f"{subject.name}, {where}: not in a CUDA graph: {first_line(error)}")
        else:
            good.append(subject)
    return good


def _copies(shape: Shape) -> int:
    """Return how many caches keep L2 cold: one where it is much larger than L2 by itself."""
    if shape.bytes_read() >= timing.ROTATED_BYTES:
        return 1
    return min(timing.MIN_CALLS, timing.copies_needed(shape.bytes_read()))


def write(rows: Sequence[Row], notes: Sequence[str], rates: Rates, directory: Path) -> None:
    """Write ``attention.csv`` and ``attention.md``.

    Args:
        rows: every measured cell.
        notes: what was not measured, and why.
        rates: of the card.
        directory: made if missing.

    Raises:
        OSError: they cannot be written.
    """
    report.write_csv(directory / "attention.csv", _COLUMNS, (row.cells() for row in rows))
    lines = [
        report.measured_with(str(rates)),
        "",
        "32 query heads, 8 key heads, 128 elements, causal. µs, median [p20, p80] / TFLOP/s, or "
        "TB/s of keys and values (share of the card's rate); ratio = best rival ÷ ours (> 1: ours "
        "is faster); own = our bf16 ÷ this.",
        "",
    ]
    for shape in dict.fromkeys(row.shape for row in rows):
        lines += [f"- {shape}: {line(shape, rows)}"]
    lines += ["", *(f"- {note}" for note in notes), ""]
    (directory / "attention.md").write_text("\n".join(lines), encoding="utf-8")


def line(shape: Shape, rows: Sequence[Row]) -> str:
    """Return one shape's figures in a line.

    Args:
        shape: which.
        rows: of all shapes.
    """
    found = [row for row in rows if row.shape == shape]
    parts = [f"floor {floor_us(shape, found[0].rates):.1f}"]
    for row in found:
        time = row.timing
        rate = f"{row.rate / 1e12:.2f}" if shape.part == "decode" else f"{row.rate / 1e12:.0f}"
        parts.append(
            f"{row.kernel} {time.median:.1f} [{time.p20:.1f}, {time.p80:.1f}] / {rate} "
            f"({row.share:.0%})"
        )
    ours = next((row for row in found if row.kernel == "taut"), None)
    rivals = [row for row in found if row.kernel != "taut"]
    if ours and rivals:
        best = min(rivals, key=lambda row: row.timing.median)
        ratio = best.timing.median / ours.timing.median
        parts.append(f"ratio {ratio:.2f} ({best.kernel})")
    wide = _own_bf16(shape, rows)
    if ours and wide:
        parts.append(f"own {wide.timing.median / ours.timing.median:.2f}")
    return "; ".join(parts)


def _own_bf16(shape: Shape, rows: Sequence[Row]) -> Row | None:
    """Return our row of the same shape with a bf16 cache, for one of 8 bits."""
    if shape.cache == "bf16":
        return None
    same = Shape(shape.part, shape.batch, shape.tokens)
    return next((row for row in rows if row.shape == same and row.kernel == "taut"), None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m taut_bench.attention", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--cache", action="append", choices=("bf16", "fp8", "int8"))
    parser.add_argument("--batch", type=int, action="append", help="only shapes of so many")
    parser.add_argument("--tokens", type=int, action="append", help="likewise")
    parser.add_argument("--kernel", action="append", choices=sorted({*FORWARD, *STEP, *DECODE}))
    return parser


def _chosen(arguments: argparse.Namespace) -> list[Shape]:
    def wanted(shape: Shape) -> bool:
        return (
            (not arguments.part or shape.part in arguments.part)
            and (not arguments.cache or shape.cache in arguments.cache)
            and (not arguments.batch or shape.batch in arguments.batch)
            and (not arguments.tokens or shape.tokens in arguments.tokens)
        )

    return [shape for shape in SHAPES if wanted(shape)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 where a kernel of ours was wrong."""
    arguments = _parser().parse_args(argv)
    if cuda_device.missing("taut_bench.attention"):
        return 2
    rates = Rates(product_rate(), timing.copy_ceiling())
    sys.stdout.write(f"{rates}\n")
    rows: list[Row] = []
    notes: list[str] = []
    shapes = _chosen(arguments)
    right: dict[str, list[str]] = {}
    for shape in shapes:
        part = shape.part
        if part not in right:
            names = [k for k in _KERNELS[part] if not arguments.kernel or k in arguments.kernel]
            # Decode is checked at every shape, prompts once: their reference is quadratic.
            right[part] = names if part == "decode" else _right_at_all(part, names, notes)
        rows += run_shape(shape, right[part], rates, notes)
        if rows and rows[-1].shape == shape:
            sys.stdout.write(f"{shape}: {line(shape, rows)}\n")
            sys.stdout.flush()
        torch.cuda.empty_cache()
        # What was measured survives a run that is cut off.
        write(rows, notes, rates, arguments.output)
    for note in notes:
        sys.stdout.write(note + "\n")
    return 1 if any("WRONG" in note and note.startswith("taut") for note in notes) else 0


if __name__ == "__main__":
    sys.exit(main())
