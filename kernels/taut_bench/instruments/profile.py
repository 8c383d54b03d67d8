"""Profile a subject: a chrome trace, the kernels that take the time, and findings in words."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import profiler as torch_profiler
from torch.profiler import ProfilerActivity

from taut_bench.instruments import findings
from taut_bench.instruments.errors import InstrumentError
from taut_bench.instruments.findings import Finding
from taut_bench.instruments.subject import Subject
from taut_bench.instruments.trace import Span, Trace, read_trace, self_times


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps of a profile.

    Args:
        wait: run without the profiler: compilers and caches settle.
        warmup: run with it, dropped: its own start is slow.
        active: recorded, at least one.
    """

    wait: int = 2
    warmup: int = 2
    active: int = 5

    def __post_init__(self) -> None:
        if self.wait < 0 or self.warmup < 0:
            raise InstrumentError("--wait and --warmup must not be negative")
        if self.active < 1:
            raise InstrumentError(f"--active {self.active}: must be at least 1")


@dataclass(frozen=True, slots=True)
class KernelRow:
    """All calls of one kernel, or of one operation where there is no GPU.

    Attributes:
        name: as the profiler spells it.
        calls: a step, on average.
        micros: a step, on average.
        share: of the time of all rows.
        occupancy: the profiler's estimate, 0 to 1, or None.
    """

    name: str
    calls: float
    micros: float
    share: float
    occupancy: float | None


@dataclass(frozen=True)
class Profile:
    """What was recorded.

    Attributes:
        subject: its name.
        device: kind of device.
        step_micros: time of each recorded step on the host, the profiler's own cost included; on
            CUDA the device may still be at work behind it.
        rows: the longest first.
        findings: what is worth a look.
        not_looked_at: what this machine could not show.
        trace: the file, for a trace viewer.
    """

    subject: str
    device: str
    step_micros: tuple[float, ...]
    rows: tuple[KernelRow, ...]
    findings: tuple[Finding, ...]
    not_looked_at: tuple[str, ...]
    trace: Path

    def as_json(self) -> dict[str, Any]:
        """The profile as plain data."""
        return {**asdict(self), "trace": str(self.trace)}


def record(subject: Subject, path: Path, schedule: Schedule = Schedule()) -> Profile:
    """Run a subject under the profiler and read what it recorded.

    Args:
        subject: what to run.
        path: file of the chrome trace; a name that ends in ``.gz`` is compressed.
        schedule: how many steps.

    Raises:
        InstrumentError: the trace cannot be written.
    """
    activities = [ProfilerActivity.CPU]
    if subject.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InstrumentError(f"{path.parent}: cannot be made: {error.strerror}") from error
    try:
        path.write_bytes(b"")  # now: the profiler writes when all steps are over
    except OSError as error:
        raise InstrumentError(f"{path}: cannot be written: {error.strerror}") from error
    steps = schedule.wait + schedule.warmup + schedule.active
    with torch_profiler.profile(
        activities=activities,
        schedule=torch_profiler.schedule(
            wait=schedule.wait, warmup=schedule.warmup, active=schedule.active, repeat=1
        ),
        on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(path)),
        record_shapes=True,
    ) as profiler:
        for _ in range(steps):
            # No wait for the device in between: it would show as a gap of its own.
            subject.step()
            profiler.step()
    return describe(subject.name, subject.device.type, read_trace(path), path)


def describe(subject: str, device: str, trace: Trace, path: Path) -> Profile:
    """Make a profile of a trace.

    Args:
        subject: its name.
        device: kind of device.
        trace: as read.
        path: where it was read from.
    """
    steps = len(trace.steps) or 1
    spans = list(trace.device) or self_times(trace.ops)
    return Profile(
        subject,
        device,
        tuple(step.duration for step in trace.steps),
        tuple(_rows(spans, steps)),
        tuple(findings.find(trace)),
        tuple(findings.not_looked_at(trace)),
        path,
    )


def _rows(spans: list[Span], steps: int) -> list[KernelRow]:
    groups: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        groups[span.name].append(span)
    total = sum(span.duration for span in spans) or 1.0
    rows = []
    for name, group in groups.items():
        time = sum(span.duration for span in group)
        known = [
            float(span.args["est. achieved occupancy %"])
            for span in group
            if "est. achieved occupancy %" in span.args
        ]
        occupancy = sum(known) / len(known) / 100 if known else None
        rows.append(KernelRow(name, len(group) / steps, time / steps, time / total, occupancy))
    return sorted(rows, key=lambda row: -row.micros)


def text(profile: Profile, rows: int = 15) -> str:
    """Write a profile as Markdown.

    Args:
        profile: of :func:`record`.
        rows: kernels to list at most.
    """
    steps = sorted(profile.step_micros)
    median = steps[len(steps) // 2] if steps else 0.0
    what = "kernel" if profile.device == "cuda" else "operation (without those inside it)"
    lines = [
        f"{profile.subject} on {profile.device}: {len(steps)} steps, median {median / 1e3:.2f} ms "
        "on the host with the profiler's own cost",
        "",
        f"| {what} | calls a step | µs a step | share | occupancy |",
        "|---|---|---|---|---|",
    ]
    for row in profile.rows[:rows]:
        occupancy = "–" if row.occupancy is None else f"{row.occupancy:.0%}"
        name = row.name if len(row.name) <= 80 else row.name[:79] + "…"
        lines.append(
            f"| {name} | {row.calls:g} | {row.micros:.1f} | {row.share:.1%} | {occupancy} |"
        )
    if len(profile.rows) > rows:
        lines.append(f"\n{len(profile.rows) - rows} more in the trace.")
    lines += ["", "Findings"]
    lines += [f"- {finding.kind}: {finding.text}" for finding in profile.findings] or [
        "- none of the rules fired"
    ]
    lines += [f"- {line}" for line in profile.not_looked_at]
    lines += ["", f"trace: {profile.trace} (a chrome trace: open it in Perfetto)"]
    return "\n".join(lines)
