"""The clock of every kernel benchmark: graphs, rotated weights, flushed L2, subjects in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

ROTATED_BYTES = 256 * 2**20
"""Weights one graph walks through: five times the L2 of an H100 or H200."""
MIN_CALLS = 64
REPLAYS = 60
_FLUSH_BYTES = 256 * 2**20
_COPY_BYTES = 2**30
_HEAD_START_CYCLES = 2_000_000
"""About a millisecond."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Something to time.

    Args:
        name: shown in the report.
        call: runs the operation once on the i-th copy of its weights; must be capturable.
        copies: how many copies there are.
    """

    name: str
    call: Callable[[int], object]
    copies: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call over the replays: median, 20th and 80th percentile."""

    median: float
    p20: float
    p80: float


def copies_needed(bytes_per_call: int) -> int:
    """Return how many copies of the weights keep one graph's walk out of L2."""
    return max(2, -(-ROTATED_BYTES // bytes_per_call))


def capture(subject: Subject, min_calls: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """Record a subject's calls in a CUDA graph, and replay it once.

    Args:
        subject: what to time.
        min_calls: calls the graph holds at least; more for more copies.

    Returns:
        The graph, and its calls.
    """
    calls = max(min_calls, subject.copies)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(3):
            subject.call(i % subject.copies)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads may load or compile meanwhile: what they do is no part of the graph.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for i in range(calls):
            subject.call(i % subject.copies)
    graph.replay()
    torch.cuda.synchronize()
    return graph, calls


def measure(
    subjects: Sequence[Subject], replays: int = REPLAYS, min_calls: int = MIN_CALLS
) -> list[Timing]:
    """Time subjects in turn: every round replays each of them once, after a flush of L2.

    Args:
        subjects: what to time, all on the current device.
        replays: rounds.
        min_calls: calls a graph holds at least; fewer for calls of milliseconds.

    Returns:
        One timing a subject, in order.
    """
    captured = [capture(subject, min_calls) for subject in subjects]
    flush = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    samples: list[list[float]] = [[] for _ in subjects]
    for _ in range(replays):
        for (graph, calls), times in zip(captured, samples, strict=True):
            start, stop = _event(), _event()
            # Read, not written: dirty lines would be written back on the first calls' time. The
            # flush also keeps the GPU busy until the replay is enqueued behind it.
            flush.amax()
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3 / calls)
    return [_summary(times) for times in samples]


def measure_eager(subjects: Sequence[Subject], rounds: int) -> list[Timing]:
    """Time calls that no graph can hold (autograd's, on a leaf's stream): events, one call a round.

    The device sleeps first, so that the host is ahead of it and its own time does not count.

    Args:
        subjects: what to time, all on the current device; each is called once before.
        rounds: calls of each, in turn, L2 flushed before each.

    Returns:
        One timing a subject, in order.
    """
    flush = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    samples: list[list[float]] = [[] for _ in subjects]
    for subject in subjects:
        subject.call(0)
    for i in range(rounds):
        for subject, times in zip(subjects, samples, strict=True):
            start, stop = _event(), _event()
            flush.amax()
            torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
            start.record()
            subject.call(i % subject.copies)
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3)
    return [_summary(times) for times in samples]


def host_cost(call: Callable[[], object], calls: int = 200, rounds: int = 7) -> float:
    """Measure what one call costs the host outside a graph: the least of some rounds' means, in µs.

    Args:
        call: enqueues work; its results are dropped.
        calls: in a round, few enough not to fill the launch queue of the card.
        rounds: the card is idle at the start of each.
    """
    for _ in range(10):
        call()
    least = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        least = min(least, (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return least * 1e6


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _summary(times: list[float]) -> Timing:
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return Timing(statistics.median(times), fifths[0], fifths[3])


@triton.jit  # type: ignore[untyped-decorator]
def _copy_kernel(source_ptr, target_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + offsets, tl.load(source_ptr + offsets))


def copy_subject(num_bytes: int, copies: int) -> Subject:
    """Make a copy kernel that moves as much as an operation does: its floor at that size.

    Args:
        num_bytes: read and written together; rounded up to whole programs.
        copies: pairs of buffers to rotate.
    """
    block = 1024
    size = -(-num_bytes // 8 // block) * block
    pairs = [torch.zeros(2, size, dtype=torch.int32, device="cuda") for _ in range(copies)]

    def copy(i: int) -> None:
        _copy_kernel[(size // block,)](pairs[i][0], pairs[i][1], BLOCK=block, num_warps=4)

    return Subject("copy", copy, copies)


def copy_ceiling() -> float:
    """Measure the card's copy rate in bytes read and written a second.

    A kernel, not `Tensor.copy_`: captured in a graph that becomes a copy-engine node and reads too
    low.
    """
    source = torch.randint(-(2**31), 2**31 - 1, (_COPY_BYTES // 4,), device="cuda").to(torch.int32)
    target = torch.empty_like(source)
    block = 4096

    def copy(_: int) -> None:
        _copy_kernel[(source.numel() // block,)](source, target, BLOCK=block, num_warps=8)

    timing = measure([Subject("copy", copy, 1)], replays=10)[0]
    if not torch.equal(source, target):
        raise AssertionError("the copy kernel that measures the ceiling does not copy")
    return 2 * _COPY_BYTES / (timing.median * 1e-6)
