"""Decode steps found in a trace of vLLM's profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from taut_bench import engine_profile


def kernel(name: str, start: float, us: float, launch: int) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": start, "dur": us, "args": {"correlation": launch}}


def steps(count: int, period: float) -> list[dict[str, Any]]:
    """A prefill of kernels launched one by one, then a graph of three kernels and a sampler."""
    events = [kernel("prefill", 10.0 * i, 9.0, i) for i in range(5)]
    for i in range(count):
        start, launch = 1000 + period * i, 100 + 2 * i
        # The second starts early, in the first: their times overlap.
        events += [
            kernel("gemm", start + 8, 30, launch),
            kernel("norm", start, 10, launch),
            kernel("gemm", start + 40, 20, launch),
            kernel("sampler", start + 70, 5, launch + 1),
        ]
    return [{"cat": "cpu_op", "name": "aten::add", "ts": 0, "dur": 1}, *events]


def write_trace(events: list[dict[str, Any]], path: Path) -> Path:
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


def test_a_step_is_a_replay_and_what_follows(tmp_path: Path) -> None:
    trace = write_trace(steps(4, 100.0), tmp_path / "a.json.gz")
    profile = engine_profile.parse(trace, "prefer", 16)
    assert profile is not None
    assert (profile.step_us, profile.replay_us) == (100.0, 60.0)
    assert profile.kernels == {"norm": (1, 10), "gemm": (2, 50)}


@pytest.mark.parametrize("events", [[], steps(1, 100.0), [kernel("alone", 0, 1, 1)]])
def test_a_trace_without_two_replays_says_nothing(
    events: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert engine_profile.parse(write_trace(events, tmp_path / "a.json.gz"), "prefer", 1) is None


class Engine:
    """Leaves a trace at the end of each profile, as vLLM does; none of the sizes in ``fails``."""

    def __init__(self, directory: Path, fails: set[int]) -> None:
        self.directory, self.fails, self.batch, self.profiled = directory, fails, 0, False

    def start_profile(self) -> None:
        self.profiled = True

    def stop_profile(self) -> None:
        assert self.profiled
        events = [] if self.batch in self.fails else steps(3, 100.0 * self.batch)
        write_trace(events, self.directory / f"{self.batch}.json.gz")
        self.profiled = False

    def answer(self, batch: int) -> None:
        assert self.profiled
        self.batch = batch


def test_every_size_has_its_own_trace_and_a_failure_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces, path = tmp_path / "traces", tmp_path / "profile.csv"
    traces.mkdir()
    engine = Engine(traces, {4})
    calls = {batch: (lambda batch=batch: engine.answer(batch)) for batch in (1, 4, 2)}
    engine_profile.record_all(engine, "off", calls, traces, path)
    assert "off, 4 sequences: no trace" in capsys.readouterr().out
    text = "\n".join(engine_profile.report("off", path))
    assert "off, 1 sequences: a step every 100.0 µs, its CUDA graph 60.0 µs" in text
    assert "off, 2 sequences: a step every 200.0 µs" in text
    assert "4 sequences" not in text
    assert text.index("| `gemm` | 2 | 50.0 |") < text.index("| `norm` | 1 | 10.0 |")


def test_a_profile_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert engine_profile.report("off", tmp_path / "none.csv") == [
        "- off: not profiled, see its log"
    ]
    engine_profile.write([], tmp_path / "empty.csv")
    assert engine_profile.report("off", tmp_path / "empty.csv") == [
        "- off: not profiled, see its log"
    ]
