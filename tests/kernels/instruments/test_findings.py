"""Each rule on a trace made for it: what must fire it, and what must not."""

from __future__ import annotations

from typing import Any

import pytest

from taut_bench.instruments import findings
from taut_bench.instruments.trace import (
    Trace,
    idle,
    operations,
    parse,
    self_times,
    top_level,
)

Event = dict[str, Any]


def kernel(name: str, start: float, duration: float, stream: int = 7, **args: Any) -> Event:
    return {
        "ph": "X",
        "cat": args.pop("cat", "kernel"),
        "name": name,
        "ts": start,
        "dur": duration,
        "tid": stream,
        "args": {"stream": stream, **args},
    }


def host(name: str, start: float, duration: float, cat: str = "cpu_op", **args: Any) -> Event:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": start,
        "dur": duration,
        "tid": 1,
        "args": args,
    }


def trace(*events: Event, multiprocessors: int = 132) -> Trace:
    return parse({"traceEvents": list(events), "deviceProperties": [{"numSms": multiprocessors}]})


def launched(name: str, start: float, duration: float, number: int, delay: float) -> list[Event]:
    """A kernel and the launch that precedes its start by ``delay``."""
    launch = host("cudaLaunchKernel", start - delay - 2, 2, "cuda_runtime", correlation=number)
    return [kernel(name, start, duration, correlation=number), launch]


def test_gaps_between_kernels_are_counted_over_all_streams() -> None:
    found = findings.gaps(
        trace(
            kernel("a", 0, 40),
            kernel("b", 30, 30, stream=8),  # covers the end of a
            kernel("c", 80, 10),
            kernel("d", 95, 5),
        )
    )
    assert found is not None
    assert found.figures == {"share": 0.25, "idle_us": 25.0, "gaps": 2, "longest_us": 20.0}
    assert "25% of the time (25.0 µs of 100.0 µs)" in found.text
    assert "between b and c" in found.text


def test_small_gaps_are_no_finding() -> None:
    assert findings.gaps(trace(kernel("a", 0, 50), kernel("b", 55, 50))) is None
    assert findings.gaps(trace(kernel("a", 0, 50))) is None
    assert findings.gaps(trace()) is None


def test_gaps_on_a_cpu_are_those_between_operations() -> None:
    found = findings.gaps(
        trace(
            host("autograd::engine::evaluate_function: AddBackward0", 0, 100),
            host("aten::add", 0, 10),
            host("aten::empty", 2, 3),
            host("aten::mul", 90, 10),
        )
    )
    assert found is not None
    assert found.figures["idle_us"] == 80
    assert "Python" in found.text


def test_tiny_kernels_are_named_and_counted() -> None:
    tiny = [kernel("small", 10 * i, 4) for i in range(6)]
    found = findings.tiny(trace(*tiny, kernel("big", 100, 76)))
    assert found is not None
    assert found.figures == {"count": 6, "of": 7, "share": 6 / 7, "time_share": 0.24}
    assert "6 of 7 kernels (86%)" in found.text
    assert "small × 6" in found.text


def test_few_or_negligible_tiny_kernels_are_no_finding() -> None:
    few = [kernel("small", 0, 4), *(kernel("big", 10 + 50 * i, 50) for i in range(3))]
    assert findings.tiny(trace(*few)) is None
    negligible = [kernel("small", 0, 1), kernel("big", 10, 1000)]
    assert findings.tiny(trace(*negligible)) is None
    copies = [kernel("Memcpy", i, 1, cat="gpu_memcpy") for i in range(5)]
    assert findings.tiny(trace(*copies)) is None, "copies are no kernels"


OCCUPANCY = "est. achieved occupancy %"


def test_low_occupancy_is_weighed_by_time_and_says_what_bounds_it() -> None:
    fat = {
        OCCUPANCY: 10,
        "grid": [4096, 1, 1],
        "registers per thread": 255,
        "shared memory": 98304,
    }
    found = findings.low_occupancy(
        trace(kernel("fat", 0, 60, **fat), kernel("good", 60, 40, **{OCCUPANCY: 80}))
    )
    assert found is not None
    assert found.figures == {"kernels": 1, "time_share": 0.6, "occupancy": 0.1}
    assert "255 registers a thread and 98304 bytes" in found.text


def test_a_grid_smaller_than_the_card_is_the_reason_given() -> None:
    small = {OCCUPANCY: 5, "grid": [10, 2, 1]}
    found = findings.low_occupancy(trace(kernel("few", 0, 60, **small)))
    assert found is not None
    assert "its 20 blocks leave some of the 132 multiprocessors without one" in found.text


def test_short_or_unknown_occupancy_is_no_finding() -> None:
    short = kernel("fat", 0, 4, **{OCCUPANCY: 1})
    assert findings.low_occupancy(trace(short, kernel("long", 10, 96))) is None
    assert findings.low_occupancy(trace(kernel("unknown", 0, 60))) is None


def test_cpu_bound_needs_an_idle_device_and_an_empty_queue() -> None:
    events = [event for i in range(5) for event in launched("k", 100.0 * i + 20, 10, i, delay=5)]
    found = findings.cpu_bound(trace(*events))
    assert found is not None
    assert found.figures == {"busy_share": pytest.approx(50 / 410), "launch_delay_us": 5.0}
    assert "busy 12% of the time" in found.text


def test_a_full_queue_or_a_busy_device_is_not_cpu_bound() -> None:
    queued = [event for i in range(5) for event in launched("k", 100.0 * i, 10, i, delay=500)]
    assert findings.cpu_bound(trace(*queued)) is None
    busy = [event for i in range(5) for event in launched("k", 10.0 * i, 9, i, delay=5)]
    assert findings.cpu_bound(trace(*busy)) is None
    assert findings.cpu_bound(trace(kernel("a", 0, 1), kernel("b", 99, 1))) is None, "no launches"


def test_waits_under_an_operation_are_found() -> None:
    waits = [
        kernel("k", 0, 100),
        host("aten::_local_scalar_dense", 10, 30),
        host("cudaStreamSynchronize", 12, 20, "cuda_runtime"),
        host("cudaDeviceSynchronize", 90, 10, "cuda_runtime"),  # the profiler's own
    ]
    found = findings.host_waits(trace(*waits))
    assert found is not None
    assert found.figures == {"waits": 1, "wait_us": 20}
    assert "aten::_local_scalar_dense × 1" in found.text
    assert findings.host_waits(trace(*waits[:1], waits[3])) is None


def test_copies_between_memories_and_between_layouts() -> None:
    found = findings.copies(trace(kernel("k", 0, 60), kernel("HtoD", 60, 40, cat="gpu_memcpy")))
    assert found is not None
    assert found.figures == {"share": 0.4, "count": 1}
    on_cpu = findings.copies(
        trace(
            host("aten::to", 0, 22),
            host("aten::_to_copy", 1, 20),
            host("aten::copy_", 2, 15),
            host("aten::mm", 30, 78),
        )
    )
    assert on_cpu is not None
    assert on_cpu.figures == {"share": 0.2, "count": 1}, "a copy inside a cast counts once"
    assert findings.copies(trace(kernel("k", 0, 95), kernel("m", 95, 5, cat="gpu_memcpy"))) is None


def test_one_dominant_kernel_bounds_what_the_rest_can_gain() -> None:
    found = findings.dominant(trace(kernel("gemm", 0, 80), kernel("add", 80, 20)))
    assert found is not None
    assert "gemm is 80% of the time on the device: nothing else can gain more than 1.2 times" in (
        found.text
    )
    even = [kernel("a", 0, 40), kernel("b", 40, 30), kernel("c", 70, 30)]
    assert findings.dominant(trace(*even)) is None
    assert findings.dominant(trace(kernel("only", 0, 10))) is None


def test_a_quiet_trace_has_no_findings_and_a_cpu_trace_says_what_is_missing() -> None:
    quiet = trace(kernel("a", 0, 40), kernel("b", 40, 40), kernel("c", 80, 40))
    assert findings.find(quiet) == []
    assert findings.not_looked_at(quiet) == []
    assert "no kernel of a GPU" in findings.not_looked_at(trace(host("aten::mm", 0, 1)))[0]


def test_every_rule_has_a_test_that_fires_it() -> None:
    """A trace that breaks every rule at once, so that a rule left out of the list shows."""
    sick = {OCCUPANCY: 5, "grid": [1, 1, 1]}
    events = [
        *(e for i in range(8) for e in launched("tiny", 100.0 * i + 20, 4, i, delay=5)),
        kernel("slow", 900, 60, **sick),
        kernel("HtoD", 1000, 20, cat="gpu_memcpy"),
        host("aten::item", 500, 60),
        host("cudaStreamSynchronize", 505, 40, "cuda_runtime"),
    ]
    kinds = [finding.kind for finding in findings.find(trace(*events))]
    assert kinds == [
        "gaps",
        "cpu_bound",
        "host_waits",
        "tiny_kernels",
        "low_occupancy",
        "copies",
        "dominant",
    ]


def test_spans_nest_by_thread() -> None:
    spans = trace(
        host("aten::linear", 0, 10),
        host("aten::addmm", 1, 8),
        host("aten::empty", 2, 1),
        host("AddmmBackward0", 20, 10),
        host("aten::mm", 22, 5),
    )
    assert [span.name for span in top_level(spans.ops)] == ["aten::linear", "AddmmBackward0"]
    assert [span.name for span in operations(spans)] == ["aten::linear", "aten::mm"]
    assert [span.duration for span in self_times(spans.ops)] == [2, 7, 1, 5, 5]
    assert idle([]) == []
