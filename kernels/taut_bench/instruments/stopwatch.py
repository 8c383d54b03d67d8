"""How long a step of a subject takes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch.utils import benchmark

from taut_bench.instruments import cuda_graph
from taut_bench.instruments.subject import Subject, tensors_in

_MIN_SECONDS = 0.3
_MOST_CALLS, _GRAPH_SECONDS, _REPLAYS = 64, 5e-3, 20


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a step.

    Attributes:
        median: of the runs.
        low: 25th percentile (20th in a graph).
        high: 75th percentile (80th in a graph).
        method: how it was measured, in words.
    """

    median: float
    low: float
    high: float
    method: str


def time_step(subject: Subject, min_seconds: float = _MIN_SECONDS) -> Timing:
    """Time a step.

    On CUDA a step that can be captured is replayed in a graph between flushes of L2, as the kernel
    benchmarks do; one that cannot is timed eagerly, launches and waits included, and the method
    says why. On a CPU it runs until ``min_seconds`` are over.

    Args:
        subject: what to time.
        min_seconds: of measuring, at least; for eager timing.
    """
    why_not = "on a CPU"
    if subject.device.type == "cuda":
        reason = cuda_graph.why_not_capturable(subject)
        try:
            if reason is None:
                return _in_graph(subject)
        except RuntimeError as error:  # what only the capture itself finds
            reason = str(error).splitlines()[0]
        why_not = f"not in a CUDA graph: {reason}"
    timer = benchmark.Timer(
        "step()", globals={"step": subject.step}, num_threads=torch.get_num_threads()
    )
    found = timer.blocked_autorange(min_run_time=min_seconds)
    times = torch.tensor(found.times, dtype=torch.float64)
    low, high = (times.quantile(q).item() for q in (0.25, 0.75))
    return Timing(found.median, low, high, f"eager, {why_not}")


def _in_graph(subject: Subject) -> Timing:
    from taut_kernels.tuner import timing

    copies = _rotated(subject, timing.ROTATED_BYTES)
    calls = max(len(copies), _calls_to_fill(subject))
    rotated = timing.Subject(subject.name, lambda i: copies[i].step(), len(copies))
    found = timing.measure([rotated], replays=_REPLAYS, min_calls=calls)[0]
    method = (
        f"CUDA graph of {calls} calls over {len(copies)} copies of the inputs, L2 flushed before "
        "each replay"
    )
    return Timing(found.median * 1e-6, found.p20 * 1e-6, found.p80 * 1e-6, method)


def _rotated(subject: Subject, target_bytes: int) -> list[Subject]:
    """Copies of a subject's inputs, enough to walk through more than L2; a module has one.

    A module's weights cannot be copied with its inputs: what of them fits L2 is found there by
    every call of a graph but the first. Inputs as large as the walk are not copied.
    """
    size = sum(tensor.nbytes for tensor in tensors_in((subject.args, subject.kwargs)))
    if isinstance(subject.call, torch.nn.Module) or not size:
        return [subject]
    count = min(_MOST_CALLS, -(-target_bytes // size))
    if count == 1:
        return [subject]
    return [cuda_graph.with_own_inputs(subject) for _ in range(count)]


def _calls_to_fill(subject: Subject) -> int:
    """Calls that fill a graph for so long that its own start, about 5 µs, does not count."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    subject.step()
    torch.cuda.synchronize()
    return max(1, min(_MOST_CALLS, int(_GRAPH_SECONDS / (time.perf_counter() - start))))
