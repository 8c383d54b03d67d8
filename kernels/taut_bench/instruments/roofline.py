"""How near a subject comes to what the machine allows.

The floor of a computation is the larger of its bytes over the copy rate and its FLOPs over the
matrix rate; the fraction is that floor over the measured time. The model is that of Williams,
Waterman and Patterson, "Roofline" (CACM 2009), with measured ceilings in place of the data sheet's.
A pointwise operation is held to the matrix rate too, which it can never reach; its bytes bind
first. More than 100 % means that operands stayed in a cache, which the bytes do not know of.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from taut_bench.instruments.ceilings import Ceilings, dtype_name
from taut_bench.instruments.counters import Count, count
from taut_bench.instruments.stopwatch import Timing, time_step
from taut_bench.instruments.subject import Subject
from taut_bench.instruments.work import Work

_PROFILED_STEPS = 3
MATRIX_DTYPES = {
    "fp8_gemm": torch.float8_e4m3fn,
    "w8a8_gemm": torch.int8,
}
"""Ops of ours whose products are not in the dtype of their activations."""


@dataclass(frozen=True, slots=True)
class Row:
    """One point under the roof.

    Attributes:
        name: of the subject or operation.
        flops: of a step.
        moved: bytes of a step.
        intensity: FLOPs a byte.
        seconds: measured, of a step.
        floor_seconds: what the ceilings allow.
        bound: ``memory`` or ``compute``, whichever sets the floor.
        fraction: floor ÷ measured.
    """

    name: str
    flops: int
    moved: int
    intensity: float
    seconds: float
    floor_seconds: float
    bound: str
    fraction: float


@dataclass(frozen=True)
class Roofline:
    """The result for one subject.

    Attributes:
        subject: its name.
        dtype: of its products; picks the matrix ceiling.
        whole: the step against its compulsory bytes: what perfect fusion would reach.
        eager: the step against the bytes its operations move one by one.
        by_op: kinds of operations against their own bytes, the longest first; empty for one op.
        timing: of the step.
        counted: bytes and FLOPs.
    """

    subject: str
    dtype: torch.dtype
    whole: Row
    eager: Row
    by_op: tuple[Row, ...]
    timing: Timing
    counted: Count

    def as_json(self) -> dict[str, Any]:
        """The result as plain data."""
        return {
            "subject": self.subject,
            "dtype": dtype_name(self.dtype),
            "whole": _row_json(self.whole),
            "eager": _row_json(self.eager),
            "by_op": [_row_json(row) for row in self.by_op],
            "timing": asdict(self.timing),
        }


def _row_json(row: Row) -> dict[str, Any]:
    # JSON has no infinity: nothing moved, something computed.
    intensity = row.intensity if math.isfinite(row.intensity) else None
    return {**asdict(row), "intensity": intensity}


def matrix_dtype(subject: Subject) -> torch.dtype:
    """The dtype whose matrix rate bounds a subject."""
    op = subject.name.partition("[")[0]
    return MATRIX_DTYPES.get(op, subject.dtype())


def analyse(subject: Subject, ceilings: Ceilings) -> Roofline:
    """Count and time a subject.

    Args:
        subject: what to look at.
        ceilings: of its device, with its :func:`matrix_dtype`.
    """
    counted = count(subject)
    timing = time_step(subject)
    dtype = matrix_dtype(subject)
    whole = place(subject.name, counted.compulsory, timing.median, ceilings, dtype)
    eager = place("its operations one by one", counted.dispatched, timing.median, ceilings, dtype)
    by_op: list[Row] = []
    if len(counted.by_op) > 1:
        seconds = seconds_by_op(subject, {entry.op for entry in counted.by_op})
        by_op = [
            place(entry.op, entry.work, seconds[entry.op], ceilings, dtype)
            for entry in counted.by_op
            if seconds.get(entry.op)
        ]
        by_op.sort(key=lambda row: -row.seconds)
    return Roofline(subject.name, dtype, whole, eager, tuple(by_op), timing, counted)


def place(name: str, work: Work, seconds: float, ceilings: Ceilings, dtype: torch.dtype) -> Row:
    """Put a measured computation under the roof.

    Args:
        name: shown in the table.
        work: its bytes and FLOPs.
        seconds: it took, more than 0.
        ceilings: of the device.
        dtype: picks the matrix ceiling; one that was not measured does not bound.
    """
    by_memory = work.moved / ceilings.copy_bytes_per_s
    rate = ceilings.matrix_flops_per_s.get(dtype_name(dtype))
    by_compute = work.flops / rate if rate else 0.0
    floor = max(by_memory, by_compute)
    bound = "compute" if by_compute > by_memory else "memory"
    fraction = floor / seconds
    return Row(name, work.flops, work.moved, work.intensity, seconds, floor, bound, fraction)


def seconds_by_op(subject: Subject, ops: set[str]) -> dict[str, float]:
    """Seconds a step spends in each kind of operation, by the profiler.

    Args:
        subject: what to run.
        ops: names as the dispatcher spells them; what runs inside one of them is its time, not
            counted again.
    """
    on_cuda = subject.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    subject.step()
    with profile(activities=activities) as profiler:
        for _ in range(_PROFILED_STEPS):
            subject.step()
        if on_cuda:
            torch.cuda.synchronize()
    totals: dict[str, float] = defaultdict(float)
    for event in profiler.events() or ():
        if event.name not in ops or _is_inside(event, ops):
            continue
        micros = event.device_time_total if on_cuda else event.cpu_time_total
        totals[event.name] += micros * 1e-6 / _PROFILED_STEPS
    return dict(totals)


def _is_inside(event: Any, ops: set[str]) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name in ops:
            return True
        parent = parent.cpu_parent
    return False


def table(result: Roofline, ceilings: Ceilings, rows: int = 12) -> str:
    """Write a result as Markdown.

    Args:
        result: of :func:`analyse`.
        ceilings: it was held to.
        rows: operations to list at most.
    """
    # For a single operation the second line would say what the first does.
    shown = [result.whole, *([result.eager] if result.by_op else []), *result.by_op[:rows]]
    lines = [
        f"{result.subject} on {ceilings.device}",
        ceilings_line(ceilings, result.dtype),
        f"timed: {result.timing.method}; 25th to 75th percentile "
        f"{_time(result.timing.low)} to {_time(result.timing.high)}",
        "",
        "| | time | FLOPs | bytes | FLOPs/byte | bound | floor | of the roof |",
        "|---|---|---|---|---|---|---|---|",
        *(_line(row) for row in shown),
    ]
    left_out = len(result.by_op) - rows
    if left_out > 0:
        lines.append(f"\n{left_out} more kinds of operation in the JSON.")
    gain = result.eager.moved / result.whole.moved if result.whole.moved else 1.0
    if gain > 1.05:
        lines.append(
            f"\nRun one by one, the operations move {gain:.1f} times the bytes a perfect fusion "
            "would."
        )
    return "\n".join(lines)


def ceilings_line(ceilings: Ceilings, dtype: torch.dtype) -> str:
    """Say the ceilings, and what was not measured, in one line."""
    name = dtype_name(dtype)
    rate = ceilings.matrix_flops_per_s.get(name)
    if rate is None:
        why = ceilings.not_measured.get(name, "not asked for")
        matrix = f"no {name} matrix rate ({why})"
    else:
        matrix = f"{name} matrix {rate / 1e12:.3g} TFLOP/s"
    copy = f"copy {ceilings.copy_bytes_per_s / 1e9:.3g} GB/s"
    return f"ceilings, measured {ceilings.measured}: {copy}, {matrix}"


def _line(row: Row) -> str:
    cells = (
        row.name,
        _time(row.seconds),
        _count(row.flops),
        _count(row.moved),
        f"{row.intensity:.3g}",
        row.bound,
        _time(row.floor_seconds),
        f"{row.fraction:.0%}",
    )
    return f"| {' | '.join(cells)} |"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _count(value: int) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return str(value)
