"""What a trace says, in words with numbers.

Each rule is a function of a :class:`~.trace.Trace` that returns a :class:`Finding` or None. Its
threshold stands above it with the reason for it. Without a GPU in the trace the rules about gaps
and tiny work look at the operations on the host instead, and those about the device stay silent;
:func:`not_looked_at` says so.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from taut_bench.instruments.trace import Span, Trace, idle, operations, top_level


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that costs time.

    Attributes:
        kind: stable name of the rule.
        text: one or two sentences with the figures.
        figures: the same figures as data; times in µs, shares between 0 and 1.
    """

    kind: str
    text: str
    figures: dict[str, float]


# A step whose device (or, on a CPU, whose dispatcher) rests for a tenth of it is worth a look.
_GAP_SHARE = 0.10


def gaps(trace: Trace) -> Finding | None:
    """Time between kernels in which nothing runs."""
    spans = list(trace.device) or operations(trace)
    if len(spans) < 2:
        return None
    found = idle(spans)
    total = sum(gap for gap, _, _ in found)
    wall = max(span.end for span in spans) - spans[0].start
    share = total / wall if wall else 0.0
    if share < _GAP_SHARE:
        return None
    longest, before, behind = max(found, key=lambda entry: entry[0])
    what, remedy = (
        ("the device is idle between kernels", "a CUDA graph or larger kernels close such gaps")
        if trace.device
        else (
            "no operation runs: that is Python and autograd",
            "torch.compile or larger calls help",
        )
    )
    return Finding(
        "gaps",
        f"{share:.0%} of the time ({_us(total)} of {_us(wall)}) {what}, in {len(found)} gaps; the "
        f"longest, {_us(longest)}, is between {_short(before.name)} and {_short(behind.name)}: "
        f"{remedy}.",
        {"share": share, "idle_us": total, "gaps": len(found), "longest_us": longest},
    )


# A launch costs the host 2 to 10 µs: a kernel below 5 µs may cost more to launch than to run. On a
# CPU an operation below 5 µs is mostly dispatch.
_TINY_US = 5.0
_TINY_COUNT_SHARE = 0.3
_TINY_TIME_SHARE = 0.02


def tiny(trace: Trace) -> Finding | None:
    """Kernels, or operations on a CPU, that are over before the next can be prepared."""
    spans = list(trace.kernels) if trace.device else operations(trace)
    small = [span for span in spans if span.duration < _TINY_US]
    total = sum(span.duration for span in spans)
    share = len(small) / len(spans) if spans else 0.0
    time = sum(span.duration for span in small)
    if share < _TINY_COUNT_SHARE or time < _TINY_TIME_SHARE * total:
        return None
    names = _most_frequent(small)
    what = "kernels" if trace.device else "operations"
    remedy = "fuse them, or replay them in a CUDA graph" if trace.device else "fuse them"
    return Finding(
        "tiny_kernels",
        f"{len(small)} of {len(spans)} {what} ({share:.0%}) run for less than {_TINY_US:.0f} µs "
        f"and take {time / total:.0%} of the {what}' time, most often {names}: {remedy}.",
        {"count": len(small), "of": len(spans), "share": share, "time_share": time / total},
    )


# The profiler's estimate; below a quarter of the warps a multiprocessor can hold, latency of memory
# is rarely hidden, unless the kernel was built for few fat warps (a GEMM with wgmma).
_LOW_OCCUPANCY = 25.0
_OCCUPANCY_TIME_SHARE = 0.05


def low_occupancy(trace: Trace) -> Finding | None:
    """Kernels that fill little of the card, weighed by their time."""
    kernels = trace.kernels
    total = sum(span.duration for span in kernels)
    low: dict[str, list[Span]] = defaultdict(list)
    for span in kernels:
        occupancy = span.args.get("est. achieved occupancy %")
        if occupancy is not None and float(occupancy) < _LOW_OCCUPANCY:
            low[span.name].append(span)
    time = sum(span.duration for spans in low.values() for span in spans)
    if not total or time < _OCCUPANCY_TIME_SHARE * total:
        return None
    name, spans = max(low.items(), key=lambda entry: sum(span.duration for span in entry[1]))
    occupancy = statistics.mean(float(s.args["est. achieved occupancy %"]) for s in spans)
    return Finding(
        "low_occupancy",
        f"{len(low)} kernels with {time / total:.0%} of the kernels' time keep less than "
        f"{_LOW_OCCUPANCY:.0f} % of the warps busy; the longest, {_short(name)}, "
        f"{occupancy:.0f} %: {_why_low(spans[0], trace.multiprocessors)}.",
        {"kernels": len(low), "time_share": time / total, "occupancy": occupancy / 100},
    )


def _why_low(span: Span, multiprocessors: int | None) -> str:
    blocks = 1
    for size in span.args.get("grid", ()):
        blocks *= int(size)
    registers = span.args.get("registers per thread")
    shared = span.args.get("shared memory")
    if multiprocessors and span.args.get("grid") and blocks < multiprocessors:
        return (
            f"its {blocks} blocks leave some of the {multiprocessors} multiprocessors without one"
        )
    return f"{registers} registers a thread and {shared} bytes of shared memory a block bound it"


# A kernel that starts within 20 µs of its launch found an empty queue: the host was not ahead.
_QUEUE_EMPTY_US = 20.0
_BUSY_SHARE = 0.7


def cpu_bound(trace: Trace) -> Finding | None:
    """The device waits for the host to launch."""
    if len(trace.device) < 2:
        return None
    wall = max(span.end for span in trace.device) - trace.device[0].start
    busy = wall - sum(gap for gap, _, _ in idle(trace.device))
    waits = _launch_delays(trace)
    if not wall or not waits or busy / wall > _BUSY_SHARE:
        return None
    delay = statistics.median(waits)
    if delay > _QUEUE_EMPTY_US:
        return None
    return Finding(
        "cpu_bound",
        f"the host is the limit: the device is busy {busy / wall:.0%} of the time and kernels "
        f"start {delay:.1f} µs (median) after their launch, so that none was queued: launch less "
        "(fuse, CUDA graph) or from compiled code.",
        {"busy_share": busy / wall, "launch_delay_us": delay},
    )


def _launch_delays(trace: Trace) -> list[float]:
    launches = {
        span.args["correlation"]: span
        for span in trace.runtime
        if "correlation" in span.args and "Launch" in span.name
    }
    return [
        span.start - launches[span.args["correlation"]].end
        for span in trace.kernels
        if span.args.get("correlation") in launches
    ]


_WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuCtxSynchronize",
)
_WAIT_SHARE = 0.02


def host_waits(trace: Trace) -> Finding | None:
    """Calls in which the host waits for the device, inside a step."""
    if not trace.device:
        return None
    # The profiler itself waits at the end of a step; only what lies under an operation counts.
    found = [
        span
        for span in trace.runtime
        if span.name in _WAITS and any(_holds(op, span) for op in trace.ops)
    ]
    wall = max(span.end for span in trace.device) - trace.device[0].start
    time = sum(span.duration for span in found)
    if not found or time < _WAIT_SHARE * wall:
        return None
    ops = [op for op in trace.ops if any(_holds(op, span) for span in found)]
    names = _most_frequent(top_level(ops))
    return Finding(
        "host_waits",
        f"the host waits for the device {len(found)} times, {_us(time)} in all, under {names}: a "
        "value read back (.item(), .cpu(), a condition on a tensor) empties the queue.",
        {"waits": len(found), "wait_us": time},
    )


_COPY_OPS = {"aten::copy_", "aten::contiguous", "aten::clone", "aten::_to_copy"}
_COPY_SHARE = 0.10


def copies(trace: Trace) -> Finding | None:
    """Time spent on copies: between host and device, or from one layout or dtype to another."""
    if trace.device:
        spans = [span for span in trace.device if span.category == "gpu_memcpy"]
        total = sum(span.duration for span in trace.device)
        what = "copies between memories"
    else:
        named = [span for span in trace.ops if span.name in _COPY_OPS]
        spans, total = top_level(named), sum(span.duration for span in operations(trace))
        what = "copies to another layout or dtype"
    time = sum(span.duration for span in spans)
    if not spans or not total or time < _COPY_SHARE * total:
        return None
    return Finding(
        "copies",
        f"{time / total:.0%} of the time ({_us(time)}) goes to {len(spans)} {what}: "
        f"{_most_frequent(spans)}.",
        {"share": time / total, "count": len(spans)},
    )


_DOMINANT_SHARE = 0.5


def dominant(trace: Trace) -> Finding | None:
    """One kernel, or operation, that is most of the time: the one to make faster."""
    totals: dict[str, float] = defaultdict(float)
    for span in trace.device or operations(trace):
        totals[span.name] += span.duration
    if len(totals) < 2:
        return None
    name, time = max(totals.items(), key=lambda entry: entry[1])
    share = time / sum(totals.values()) if sum(totals.values()) else 0.0
    if share < _DOMINANT_SHARE:
        return None
    where = "on the device" if trace.device else "in operations"
    return Finding(
        "dominant",
        f"{_short(name)} is {share:.0%} of the time {where}: "
        f"nothing else can gain more than {1 / share:.1f} times.",
        {"share": share},
    )


RULES: tuple[Callable[[Trace], Finding | None], ...] = (
    gaps,
    cpu_bound,
    host_waits,
    tiny,
    low_occupancy,
    copies,
    dominant,
)


def find(trace: Trace) -> list[Finding]:
    """Apply every rule."""
    return [finding for rule in RULES if (finding := rule(trace)) is not None]


def not_looked_at(trace: Trace) -> list[str]:
    """Say what the trace cannot show."""
    if trace.device:
        return []
    return [
        "no kernel of a GPU in the trace: occupancy, launch delays and waits for the device were "
        "not looked at; gaps and tiny kernels are those of operations on the host"
    ]


def _holds(outer: Span, inner: Span) -> bool:
    return outer.track == inner.track and outer.start <= inner.start and inner.end <= outer.end


def _most_frequent(spans: Sequence[Span], shown: int = 3) -> str:
    counts: dict[str, int] = defaultdict(int)
    for span in spans:
        counts[span.name] += 1
    ordered = sorted(counts.items(), key=lambda entry: -entry[1])[:shown]
    return ", ".join(f"{_short(name)} × {count}" for name, count in ordered)


def _short(name: str, length: int = 60) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"


def _us(micros: float) -> str:
    return f"{micros / 1e3:.2f} ms" if micros >= 1e3 else f"{micros:.1f} µs"
