"""A chrome trace of `torch.profiler`, read into what the instruments ask of it. Times are µs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from taut_bench.instruments.errors import InstrumentError

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_RUNTIME = {"cuda_runtime", "cuda_driver"}
_STEP = "ProfilerStep#"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Attributes:
        name: of the kernel, operation or runtime call.
        start: µs.
        duration: µs.
        track: stream of a device span, thread of a host span.
        category: ``kernel``, ``gpu_memcpy``, ``cpu_op``, …
        args: what the profiler knows about it.
    """

    name: str
    start: float
    duration: float
    track: str
    category: str
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def end(self) -> float:
        """µs."""
        return self.start + self.duration


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """An allocation (positive) or a release (negative).

    Attributes:
        time: µs.
        size: bytes.
        address: of the block.
        thread: that did it.
        device_type: 0 for the CPU, 1 for CUDA.
    """

    time: float
    size: int
    address: int
    thread: str
    device_type: int


@dataclass(frozen=True)
class Trace:
    """One trace, everything sorted by start.

    Attributes:
        steps: the profiler's steps.
        device: kernels, copies and fills on the device.
        ops: operations of the dispatcher on the host.
        runtime: CUDA runtime calls on the host.
        annotations: spans the profiled code named itself.
        memory: allocations and releases.
        device_properties: one entry a GPU, as the profiler writes it.
    """

    steps: tuple[Span, ...]
    device: tuple[Span, ...]
    ops: tuple[Span, ...]
    runtime: tuple[Span, ...]
    annotations: tuple[Span, ...]
    memory: tuple[MemoryEvent, ...]
    device_properties: tuple[dict[str, Any], ...] = ()

    @property
    def kernels(self) -> tuple[Span, ...]:
        """Device spans that compute: no copies, no fills."""
        return tuple(span for span in self.device if span.category == "kernel")

    @property
    def multiprocessors(self) -> int | None:
        """Multiprocessors of the first GPU; None without one."""
        for properties in self.device_properties:
            if "numSms" in properties:
                return int(properties["numSms"])
        return None


def read_trace(path: Path) -> Trace:
    """Read a trace file, gzipped or not.

    Raises:
        InstrumentError: it is not a chrome trace.
    """
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        document = json.loads(raw)
    except (OSError, ValueError) as error:
        raise InstrumentError(f"{path}: not a readable trace: {error}") from error
    if not isinstance(document, dict) or "traceEvents" not in document:
        raise InstrumentError(f"{path}: not a chrome trace: no traceEvents")
    return parse(document)


def parse(document: dict[str, Any]) -> Trace:
    """Sort a trace document's events into a :class:`Trace`."""
    events = document["traceEvents"]
    spans = [_span(event) for event in events if event.get("ph") == "X"]
    spans.sort(key=lambda span: (span.start, -span.duration))
    annotations = [span for span in spans if span.category == "user_annotation"]
    return Trace(
        steps=tuple(span for span in annotations if span.name.startswith(_STEP)),
        device=tuple(span for span in spans if span.category in _DEVICE),
        ops=tuple(span for span in spans if span.category == "cpu_op"),
        runtime=tuple(span for span in spans if span.category in _RUNTIME),
        annotations=tuple(span for span in annotations if not span.name.startswith(_STEP)),
        memory=tuple(
            sorted(map(_memory, filter(_is_memory, events)), key=lambda event: event.time)
        ),
        device_properties=tuple(document.get("deviceProperties", ())),
    )


def _span(event: dict[str, Any]) -> Span:
    category = event.get("cat", "")
    args = event.get("args", {})
    track = str(args.get("stream", "")) if category in _DEVICE else str(event.get("tid"))
    return Span(
        event["name"], float(event["ts"]), float(event.get("dur", 0)), track, category, args
    )


def _is_memory(event: dict[str, Any]) -> bool:
    return event.get("name") == "[memory]"


def _memory(event: dict[str, Any]) -> MemoryEvent:
    args = event["args"]
    return MemoryEvent(
        float(event["ts"]),
        int(args["Bytes"]),
        int(args["Addr"]),
        str(event["tid"]),
        int(args["Device Type"]),
    )


def top_level(spans: Sequence[Span]) -> list[Span]:
    """Spans that lie in no other of the same track; ``spans`` sorted as in a :class:`Trace`."""
    ends: dict[str, float] = {}
    found = []
    for span in spans:
        if span.start >= ends.get(span.track, float("-inf")):
            ends[span.track] = span.end
            found.append(span)
    return found


def operations(trace: Trace) -> list[Span]:
    """Outermost operations on the host, without the spans that autograd puts around them."""
    named = [
        span for span in trace.ops if "::" in span.name and not span.name.startswith("autograd::")
    ]
    return top_level(named)


def self_times(spans: Sequence[Span]) -> list[Span]:
    """The same spans, each with only the time it does not spend in others of its track.

    Args:
        spans: sorted as in a :class:`Trace`.
    """
    inner = [0.0] * len(spans)
    open_spans: dict[str, list[int]] = {}
    for i, span in enumerate(spans):
        stack = open_spans.setdefault(span.track, [])
        while stack and spans[stack[-1]].end <= span.start:
            stack.pop()
        if stack:
            inner[stack[-1]] += span.duration
        stack.append(i)
    return [
        replace(span, duration=max(0.0, span.duration - time))
        for span, time in zip(spans, inner, strict=True)
    ]


def idle(spans: Iterable[Span]) -> list[tuple[float, Span, Span]]:
    """Gaps in which no span of any track runs.

    Args:
        spans: sorted by start.

    Returns:
        µs of each gap with the spans before and behind it, in order.
    """
    gaps = []
    last: Span | None = None
    for span in spans:
        if last is not None and span.start > last.end:
            gaps.append((span.start - last.end, last, span))
        if last is None or span.end > last.end:
            last = span
    return gaps
