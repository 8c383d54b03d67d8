"""Losses against their rivals, forward and backward: ``python -m taut_bench.loss``.

Every kernel is held to the error budget first; what fails is reported and not timed. A call takes
milliseconds and some rivals wait for the device inside, so calls are timed with events instead of
in a CUDA graph, one of each in turn, L2 flushed before each, the device kept busy until the host
has queued the call. Whoever overwrites its logits does so; no time depends on their values. Memory
is the peak over what was allocated before, gradients included. Beside each shape stands its floor:
the products at the bf16 rate of a large cuBLAS product, or the bytes at the copy rate, both
measured in the same run. Writes ``loss.csv`` and ``loss.md``.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from taut_bench import cuda_device, report
from taut_bench.loss_cases import (
    KERNELS,
    OPS,
    SHAPES,
    Loss,
    Operands,
    Shape,
    gradients,
    kernels_of,
    make_operands,
    why_wrong,
)
from taut_kernels.tuner import timing
from taut_kernels.tuner.refusal import REFUSED, first_line

ROUNDS = 15
_SIDE = 8192
_COLUMNS = "op M H V kernel us p20_us p80_us peak_GiB floor_us share_of_floor".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Row:
    """One measured cell.

    Attributes:
        shape: what was run.
        kernel: whose.
        timing: of one forward and backward.
        peak_bytes: most memory beyond what was there before.
        floor_us: what the card cannot go below.
    """

    shape: Shape
    kernel: str
    timing: timing.Timing
    peak_bytes: int
    floor_us: float

    def cells(self) -> list[str]:
        """Return the CSV's columns."""
        shape, time = self.shape, self.timing
        figures = (time.median, time.p20, time.p80)
        return [
            *map(str, (shape.op, shape.M, shape.H, shape.V, self.kernel)),
            *(f"{us:.1f}" for us in figures),
            f"{self.peak_bytes / 2**30:.3f}",
            f"{self.floor_us:.1f}",
            f"{self.floor_us / time.median:.3f}",
        ]


def floor_us(shape: Shape, flop_rate: float, byte_rate: float) -> float:
    """Return the larger of a shape's two floors in µs.

    Args:
        shape: which.
        flop_rate: bf16 operations a second.
        byte_rate: bytes copied a second, read and written.
    """
    return max(shape.flops() / flop_rate, shape.bytes_moved() / byte_rate) * 1e6


def product_rate() -> float:
    """Measure the bf16 operations a second of a large cuBLAS product."""
    a, b = (torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    subject = timing.Subject("cuBLAS", lambda _: torch.mm(a, b, out=out), 1)
    found = timing.measure([subject], replays=5, min_calls=10)[0]
    return 2 * _SIDE**3 / (found.median * 1e-6)


def _peak(loss: Loss, operands: Operands) -> int:
    for leaf in operands.leaves():
        leaf.grad = None
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients(loss, operands)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _time(losses: dict[str, Loss], operands: Operands, rounds: int) -> dict[str, timing.Timing]:
    def step(loss: Loss, _: int) -> None:
        for leaf in operands.leaves():
            leaf.grad = None
        loss(operands).backward()  # type: ignore[no-untyped-call]

    subjects = [timing.Subject(name, partial(step, loss), 1) for name, loss in losses.items()]
    return dict(zip(losses, timing.measure_eager(subjects, rounds), strict=True))


def run_shape(
    shape: Shape, kernels: Sequence[str], rounds: int, floor: float, notes: list[str]
) -> list[Row]:
    """Check, measure the memory of, and time each kernel at one shape.

    Args:
        shape: which.
        kernels: keys of `KERNELS`.
        rounds: calls of each, in turn.
        floor: of the shape, µs.
        notes: what was not run, and why, is added.

    Returns:
        A row for each kernel that ran.
    """
    # A compiled rival starts anew: eight shapes in, Dynamo would give up and run it eagerly.
    torch.compiler.reset()
    operands = make_operands(shape)
    losses: dict[str, Loss] = {}
    peaks: dict[str, int] = {}
    for kernel in kernels:
        where = f"{kernel} {shape.op} {shape.M}×{shape.H}×{shape.V}"
        try:
            loss = KERNELS[kernel](shape.op)
            if reason := why_wrong(shape, loss):
                notes.append(f"{where}: WRONG, not timed: {reason}")
                continue
            _peak(loss, operands)  # the first call compiles, and takes workspaces that stay
            peaks[kernel] = _peak(loss, operands)
        except REFUSED as error:
            notes.append(f"{where}: not run: {first_line(error)}")
            continue
        losses[kernel] = loss
    times = _time(losses, operands, rounds)
    return [Row(shape, kernel, times[kernel], peaks[kernel], floor) for kernel in losses]


def write(rows: Sequence[Row], notes: Sequence[str], ceilings: str, directory: Path) -> None:
    """Write ``loss.csv`` and ``loss.md``.

    Args:
        rows: every measured cell.
        notes: what was not measured, and why.
        ceilings: the card's rates, in words.
        directory: made if missing.

    Raises:
        OSError: they cannot be written.
    """
    report.write_csv(directory / "loss.csv", _COLUMNS, (row.cells() for row in rows))
    lines = [
        report.measured_with(ceilings),
        "",
        "Forward and backward, ms, median [p20, p80] / peak GiB, gradients included; ratio = best "
        "rival ÷ our default (> 1: ours is faster).",
        "",
    ]
    for shape in dict.fromkeys(row.shape for row in rows):
        found = [row for row in rows if row.shape == shape]
        lines += [f"- {shape.op} {shape.M}×{shape.H}×{shape.V}: {_line(found)}"]
    lines += ["", *(f"- {note}" for note in notes), ""]
    (directory / "loss.md").write_text("\n".join(lines), encoding="utf-8")


def _line(rows: Sequence[Row]) -> str:
    parts = [f"floor {rows[0].floor_us / 1e3:.2f}"]
    for row in rows:
        ms = [us / 1e3 for us in (row.timing.median, row.timing.p20, row.timing.p80)]
        memory = row.peak_bytes / 2**30
        parts.append(f"{row.kernel} {ms[0]:.2f} [{ms[1]:.2f}, {ms[2]:.2f}] / {memory:.2f}")
    ours = next((row for row in rows if row.kernel == "taut"), None)
    rivals = [row for row in rows if not row.kernel.startswith("taut")]
    if ours and rivals:
        best = min(rivals, key=lambda row: row.timing.median)
        ratio = best.timing.median / ours.timing.median
        parts.append(f"ratio {ratio:.2f} ({best.kernel})")
    return "; ".join(parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m taut_bench.loss", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--op", action="append", choices=OPS)
    parser.add_argument("--tokens", type=int, action="append", help="only shapes of so many")
    parser.add_argument("--kernel", action="append", choices=sorted(KERNELS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 where a kernel of ours was wrong."""
    arguments = _parser().parse_args(argv)
    if cuda_device.missing("taut_bench.loss"):
        return 2
    byte_rate, flop_rate = timing.copy_ceiling(), product_rate()
    ceilings = f"copy {byte_rate / 1e12:.2f} TB/s, bf16 product {flop_rate / 1e12:.0f} TFLOP/s"
    sys.stdout.write(ceilings + "\n")
    rows: list[Row] = []
    notes: list[str] = []
    for shape in SHAPES:
        if arguments.op and shape.op not in arguments.op:
            continue
        if arguments.tokens and shape.M not in arguments.tokens:
            continue
        wanted = [k for k in kernels_of(shape.op) if not arguments.kernel or k in arguments.kernel]
        floor = floor_us(shape, flop_rate, byte_rate)
        found = run_shape(shape, wanted, arguments.rounds, floor, notes)
        rows += found
        if found:
            where = f"{shape.op} {shape.M}×{shape.H}×{shape.V}"
            sys.stdout.write(f"{where}: {_line(found)}\n")
            sys.stdout.flush()
        torch.cuda.empty_cache()
        # What was measured survives a run that is cut off.
        write(rows, notes, ceilings, arguments.output)
    for note in notes:
        sys.stdout.write(note + "\n")
    return 1 if any("WRONG" in note and note.startswith("taut") for note in notes) else 0


if __name__ == "__main__":
    sys.exit(main())
