"""What holds the memory at the peak of a step: by line, by module, by operation.

Every allocation of torch, inside operations too, comes from `torch.profiler`; who asked for it from
a mode that names each operation with the user's line and the `nn.Module` it runs in. Figures are
what a step adds to what was allocated before it (weights and inputs are not in them). On CUDA the
allocator's own snapshot is written as well: :mod:`.memory_snapshot`.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import profiler as torch_profiler
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from taut_bench.instruments import caller
from taut_bench.instruments.subject import Subject, dense_parts, tensors_in
from taut_bench.instruments.trace import MemoryEvent, Span, Trace, read_trace

_MARK = "taut.memory"
_SEPARATOR = "|"
_DEVICE_TYPES = {"cpu": 0, "cuda": 1}


@dataclass(frozen=True, slots=True)
class Origin:
    """Who asked for memory.

    Attributes:
        line: ``file:line in function`` of the caller's code; ``backward`` below autograd.
        module: path of the innermost `nn.Module`, empty outside.
        op: of the dispatcher.
    """

    line: str
    module: str
    op: str


@dataclass(frozen=True, slots=True)
class Holding:
    """Memory that is held at the peak.

    Attributes:
        origin: who asked for it.
        size: bytes.
        blocks: how many allocations.
    """

    origin: Origin
    size: int
    blocks: int


@dataclass(frozen=True)
class MemoryProfile:
    """The memory of one step.

    Attributes:
        subject: its name.
        device: kind of device.
        peak: bytes above the level before the step.
        kept: bytes still there after it: results, gradients, caches.
        allocated: bytes of all allocations added up: what a fusion saves in traffic.
        allocations: how many.
        before: bytes of parameters, buffers and inputs, which a step does not allocate.
        holdings: at the peak, the largest first.
        timeline: µs from the step's start, bytes.
    """

    subject: str
    device: str
    peak: int
    kept: int
    allocated: int
    allocations: int
    before: int
    holdings: tuple[Holding, ...]
    timeline: tuple[tuple[float, int], ...]

    def as_json(self) -> dict[str, Any]:
        """The profile as plain data."""
        return asdict(self)

    def by_module(self) -> dict[str, int]:
        """Bytes at the peak by module, the most first."""
        totals: dict[str, int] = defaultdict(int)
        for holding in self.holdings:
            totals[holding.origin.module or "(no module)"] += holding.size
        return dict(sorted(totals.items(), key=lambda entry: -entry[1]))


def measure(subject: Subject) -> MemoryProfile:
    """Run one step and say what its peak is made of.

    Args:
        subject: run once before, so that caches and workspaces are not counted.
    """
    subject.step()
    for leaf in subject.leaves():
        leaf.grad = None
    on_cuda = subject.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with torch_profiler.profile(activities=activities, profile_memory=True) as profiler:
            with (
                torch_profiler.record_function(f"{_MARK}.step"),
                ModuleTracker() as modules,
                _Naming(modules),
            ):
                result = subject.step()
            # Alive until the end of the record: what a step returns is what it keeps.
            del result
        profiler.export_chrome_trace(str(path))
        trace = read_trace(path)
    return attribute(subject, trace)


def attribute(subject: Subject, trace: Trace) -> MemoryProfile:
    """Replay a trace's allocations up to the peak.

    Args:
        subject: for its name, device and what was there before.
        trace: with one span named ``taut.memory.step``, and spans that name operations in it.
    """
    step = next(span for span in trace.annotations if span.name == f"{_MARK}.step")
    kind = _DEVICE_TYPES[subject.device.type]
    events = [
        event
        for event in trace.memory
        if event.device_type == kind and step.start <= event.time <= step.end
    ]
    live: dict[int, MemoryEvent] = {}
    at_peak: list[MemoryEvent] = []
    level = peak = allocated = allocations = 0
    timeline = []
    for event in events:
        if event.size > 0:
            live[event.address] = event
            allocated += event.size
            allocations += 1
        elif live.pop(event.address, None) is None:
            continue  # a block from before the step: the garbage collector may come at any time
        level += event.size
        if level > peak:
            peak, at_peak = level, list(live.values())
        timeline.append((event.time - step.start, level))
    held = {id(t): t for t in (*tensors_in((subject.args, subject.kwargs)), *_weights(subject))}
    return MemoryProfile(
        subject.name,
        subject.device.type,
        peak,
        level,
        allocated,
        allocations,
        sum(part.nbytes for tensor in held.values() for part in dense_parts(tensor)),
        tuple(_holdings(at_peak, trace.annotations)),
        tuple(timeline),
    )


def _weights(subject: Subject) -> Iterable[Tensor]:
    if isinstance(subject.call, torch.nn.Module):
        yield from subject.call.parameters()
        yield from subject.call.buffers()


def _holdings(live: list[MemoryEvent], annotations: tuple[Span, ...]) -> list[Holding]:
    marks = [span for span in annotations if span.name.startswith(_MARK + _SEPARATOR)]
    sizes: dict[Origin, list[int]] = defaultdict(list)
    for event in live:
        sizes[_origin(event, marks)].append(event.size)
    found = [Holding(origin, sum(parts), len(parts)) for origin, parts in sizes.items()]
    return sorted(found, key=lambda holding: -holding.size)


def _origin(event: MemoryEvent, marks: list[Span]) -> Origin:
    for span in marks:
        if span.track == event.thread and span.start <= event.time <= span.end:
            op, module, line = span.name.split(_SEPARATOR, 3)[1:]
            return Origin(line, module, op)
    return Origin(caller.UNKNOWN, "", "")


class _Naming(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts a named span with line, module and operation around every operation."""

    def __init__(self, modules: ModuleTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._modules = modules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The line comes last: only a path can hold the separator.
        parts = (_MARK, func._schema.name, self._module(), caller.line())
        with torch_profiler.record_function(_SEPARATOR.join(parts)):
            return func(*args, **(kwargs or {}))

    def _module(self) -> str:
        inner = max(self._modules.parents, key=lambda path: (path != "Global", path.count(".")))
        # The tracker puts the class of the outermost module in front.
        return "" if inner == "Global" else inner.partition(".")[2] or inner


def text(profile: MemoryProfile, rows: int = 15) -> str:
    """Write a profile as Markdown.

    Args:
        profile: of :func:`measure`.
        rows: holdings to list at most.
    """
    lines = [
        f"{profile.subject} on {profile.device}: peak {megabytes(profile.peak)} above the "
        f"{megabytes(profile.before)} of weights and inputs; {megabytes(profile.kept)} kept "
        f"after the step; {profile.allocations} allocations of {megabytes(profile.allocated)}",
        "",
        "| at the peak | blocks | operation | module | line |",
        "|---|---|---|---|---|",
    ]
    for holding in profile.holdings[:rows]:
        origin = holding.origin
        lines.append(
            f"| {megabytes(holding.size)} | {holding.blocks} | {origin.op} | {origin.module} "
            f"| {origin.line} |"
        )
    if len(profile.holdings) > rows:
        lines.append(f"\n{len(profile.holdings) - rows} more in the JSON.")
    return "\n".join(lines)


def comparison(before: MemoryProfile, after: MemoryProfile) -> str:
    """Say in two lines what changed from one subject to another, e.g. by fusion."""
    lines = []
    for what, old, new in (
        ("peak", before.peak, after.peak),
        ("allocated in all", before.allocated, after.allocated),
    ):
        if 0 < new < old:
            change = f"{old / new:.2f} times less"
        else:
            change = f"{megabytes(new - old)} more" if new > old else "the same"
        lines.append(f"{what}: {megabytes(old)} before, {megabytes(new)} after: {change}")
    return "\n".join(lines)


def megabytes(size: int) -> str:
    """Bytes in MB (10**6), or in bytes where that would show nothing."""
    return f"{size / 1e6:.2f} MB" if size >= 10_000 else f"{size} B"
