"""The primitives' ladders against their rivals: ``python -m taut_bench.primitives``.

Every rung is held to the error budget first; what fails is reported and not timed. Rungs and rivals
take turns in one process, each in a CUDA graph over rotated operands, L2 flushed in between
(`timing.py`); the product's slow rungs among themselves, since they would leave the card cool for
what follows. Rivals: cuBLAS (`torch.mm`; what torch.compile calls, too), cuDNN (channels_last,
``benchmark`` on; likewise), torch eager and, at some sizes, torch.compile; beside what moves bytes
a copy kernel of as many. Writes ``primitives.csv`` and ``primitives.md`` after each case.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from taut_bench import cuda_device, report
from taut_bench.primitives_cases import PARTS, Call, Case, Subjects, cases
from taut_kernels.tuner import timing
from taut_kernels.tuner.refusal import REFUSED, first_line

REPLAYS = 12
COPY = "copy"
_COLUMNS = (
    "part case kernel us p20_us p80_us TFLOP_per_s GB_per_s share_of_copy_ceiling".split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured cell.

    Attributes:
        case: what was run.
        kernel: whose.
        timing: of one call.
        ceiling: copy rate of the card, bytes read and written a second.
    """

    case: Case
    kernel: str
    timing: timing.Timing
    ceiling: float

    def cells(self) -> list[str]:
        """Return the CSV's columns."""
        time, case = self.timing, self.case
        figures = (time.median, time.p20, time.p80)
        rate = case.bytes_moved / (time.median * 1e-6)
        return [
            case.part,
            case.name,
            self.kernel,
            *(f"{us:.3f}" for us in figures),
            f"{case.flops / time.median / 1e6:.1f}" if case.flops else "",
            f"{rate / 1e9:.1f}",
            f"{rate / self.ceiling:.4f}",
        ]


def is_ours(kernel: str) -> bool:
    """Say whether a row is one of ours."""
    return kernel.startswith("taut")


def _checked(subjects: Subjects, where: str, notes: list[str]) -> dict[str, Call]:
    """Return what may be timed: our rungs that are right, rivals that run."""
    good: dict[str, Call] = {}
    for kernel, call in (subjects.ours | subjects.rivals).items():
        try:
            y = call(0)
        except REFUSED as error:
            failed = "FAILED" if is_ours(kernel) else "not run"
            notes.append(f"{kernel} {where}: {failed}: {first_line(error)}")
            continue
        if is_ours(kernel) and (reason := subjects.why_wrong(y)):
            notes.append(f"{kernel} {where}: WRONG, not timed: {reason}")
            continue
        good[kernel] = call
    return good


def run_case(case: Case, ceiling: float, replays: int, notes: list[str]) -> list[Row]:
    """Check and time every kernel of a case.

    Args:
        case: which.
        ceiling: copy rate of the card, bytes a second.
        replays: rounds.
        notes: what was not timed, and why, is added.

    Returns:
        A row for each kernel that was timed.
    """
    made = case.make()
    good = _checked(made, f"{case.part} {case.name}", notes)
    timed = [timing.Subject(kernel, call, made.copies) for kernel, call in good.items()]
    if not case.flops:
        timed.append(timing.copy_subject(case.bytes_moved, 2))
    rows: list[Row] = []
    for apart in (True, False):
        some = [subject for subject in timed if (subject.name in made.apart) is apart]
        found = timing.measure(some, replays, case.calls)
        rows += [
            Row(case, subject.name, time, ceiling)
            for subject, time in zip(some, found, strict=True)
        ]
    return rows


def line(rows: Sequence[Row]) -> str:
    """Return a case as one line: each kernel, and our best against the best rival."""
    parts = []
    for row in rows:
        time, case = row.timing, row.case
        rate = f"{case.bytes_moved / time.median / 1e6:.2f} TB/s"
        if case.flops:
            rate = f"{case.flops / time.median / 1e6:.0f} TFLOP/s"
        parts.append(f"{row.kernel} {time.median:.1f} [{time.p20:.1f}, {time.p80:.1f}] {rate}")
    ours = min((row for row in rows if is_ours(row.kernel)), key=_median, default=None)
    rivals = [row for row in rows if not is_ours(row.kernel) and row.kernel != COPY]
    if ours and rivals:
        best = min(rivals, key=_median)
        parts.append(f"{ours.kernel} {_median(best) / _median(ours):.2f} × {best.kernel}")
    copy = next((row for row in rows if row.kernel == COPY), None)
    if ours and copy:
        parts.append(f"{_median(copy) / _median(ours):.2f} of a copy")
    return "; ".join(parts)


def _median(row: Row) -> float:
    return row.timing.median


def write(rows: Sequence[Row], notes: Sequence[str], ceiling: float, directory: Path) -> None:
    """Write ``primitives.csv`` and ``primitives.md``.

    Args:
        rows: every measured cell.
        notes: what was not measured, and why.
        ceiling: copy rate of the card, bytes a second.
        directory: made if missing.

    Raises:
        OSError: they cannot be written.
    """
    report.write_csv(directory / "primitives.csv", _COLUMNS, (row.cells() for row in rows))
    lines = [
        report.measured_with(f"copy ceiling {ceiling / 1e12:.2f} TB/s"),
        "",
        "µs per call, median [p20, p80], and the rate; then our best over the best rival (> 1: "
        "ours is faster) and over a copy kernel of as many bytes.",
        "",
    ]
    for case in dict.fromkeys((row.case.part, row.case.name) for row in rows):
        found = [row for row in rows if (row.case.part, row.case.name) == case]
        lines.append(f"- {' '.join(case)}: {line(found)}")
    lines += ["", *(f"- {note}" for note in notes), ""]
    (directory / "primitives.md").write_text("\n".join(lines), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m taut_bench.primitives", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--replays", type=int, default=REPLAYS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 where a rung was wrong or failed."""
    arguments = _parser().parse_args(argv)
    if cuda_device.missing("taut_bench.primitives"):
        return 2
    torch.backends.cudnn.benchmark = True
    ceiling = timing.copy_ceiling()
    sys.stdout.write(f"copy {ceiling / 1e12:.2f} TB/s\n")
    rows: list[Row] = []
    notes: list[str] = []
    for case in cases(tuple(arguments.part or PARTS)):
        found = run_case(case, ceiling, arguments.replays, notes)
        rows += found
        sys.stdout.write(f"{case.part} {case.name}: {line(found)}\n")
        sys.stdout.flush()
        torch.cuda.empty_cache()
        # What was measured survives a run that is cut off.
        write(rows, notes, ceiling, arguments.output)
    sys.stdout.writelines(f"{note}\n" for note in notes)
    return 1 if any("WRONG" in note or "FAILED" in note for note in notes) else 0


if __name__ == "__main__":
    sys.exit(main())
