"""Where an engine's decode step goes, by the card's clock: ``bench.engine --profile``.

vLLM's own torch profiler records some steps of each batch size; it is configured, and idle, while
the figures are measured. Where attention is in graphs a decode step is one CUDA graph,
and all kernels of a replay carry the number of the launch, so the steps are found without marks.
What a step takes beyond its replay is the sampler's and the host's: where it is more than a few
hundred µs the host sets the pace.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

COLUMNS = ("mode", "batch", "kernel", "calls", "us", "step_us", "replay_us")
_SHOWN = 12
"""Kernels a batch size has in the report; the CSV has all."""
_NAME = 80
"""Characters of a kernel's name; templates of CUTLASS have thousands."""


class Kernel(NamedTuple):
    """One event of the trace: its name, start and length in µs, and the launch it came by."""

    name: str
    start: float
    us: float
    launch: int


@dataclass(frozen=True, slots=True)
class Profile:
    """A decode step of one batch size; µs, times of steps and replays are medians over them.

    Attributes:
        mode: of the engine.
        batch: sequences.
        step_us: from one replay's start to the next one's.
        replay_us: from a replay's first kernel to the end of its last.
        kernels: name → calls and µs of a replay, means; early starts overlap, so that they may sum
            up to more than ``replay_us``.
    """

    mode: str
    batch: int
    step_us: float
    replay_us: float
    kernels: dict[str, tuple[float, float]]

    def rows(self) -> Iterable[tuple[object, ...]]:
        """Yield the rows of the CSV, the longest first."""
        for name, (calls, us) in sorted(self.kernels.items(), key=lambda item: -item[1][1]):
            step, replay = f"{self.step_us:.1f}", f"{self.replay_us:.1f}"
            yield (self.mode, self.batch, name[:_NAME], f"{calls:g}", f"{us:.1f}", step, replay)


def options(directory: Path) -> dict[str, Any]:
    """Return what ``vllm.LLM`` is told so that traces come to a directory."""
    return {
        "profiler_config": {
            "profiler": "torch",
            "torch_profiler_dir": str(directory.resolve()),
            "torch_profiler_with_stack": False,
            "torch_profiler_dump_cuda_time_total": False,
        }
    }


def record_all(
    llm: Any, mode: str, calls: Mapping[int, Callable[[], object]], traces: Path, path: Path
) -> None:
    """Profile an engine at several batch sizes, and write what was found.

    Args:
        llm: a ``vllm.LLM`` that was told :func:`options`.
        mode: of the engine.
        calls: sequences → answers that many prompts.
        traces: where the engine leaves its traces; nothing else of the kind lies there.
        path: the CSV. A size that left no usable trace is missing there, and printed: a profile
            that fails must not cost the figures measured before it.
    """
    profiles = []
    for batch, generate in calls.items():
        before = set(traces.iterdir())
        llm.start_profile()
        generate()
        llm.stop_profile()
        found = (parse(trace, mode, batch) for trace in sorted(set(traces.iterdir()) - before))
        profile = next((one for one in found if one), None)
        if profile:
            profiles.append(profile)
        else:
            sys.stdout.write(f"{mode}, {batch} sequences: no trace has a graph replayed twice\n")
    write(profiles, path)


def parse(trace: Path, mode: str, batch: int) -> Profile | None:
    """Find the decode steps of a trace.

    Args:
        trace: JSON of torch's profiler, packed by gzip or not.
        mode: of the engine.
        batch: sequences.

    Returns:
        The steps; None where no CUDA graph was replayed twice: a front end's trace has no kernels.
    """
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as file:
        replays = _replays(_kernels(json.load(file)["traceEvents"]))
    if len(replays) < 2:
        return None
    starts = [replay[0].start for replay in replays]
    kernels: dict[str, list[float]] = defaultdict(list)
    for replay in replays:
        for kernel in replay:
            kernels[kernel.name].append(kernel.us)
    count = len(replays)
    return Profile(
        mode,
        batch,
        statistics.median(b - a for a, b in itertools.pairwise(starts)),
        statistics.median(max(k.start + k.us for k in r) - r[0].start for r in replays),
        {name: (len(us) / count, sum(us) / count) for name, us in kernels.items()},
    )


def _kernels(events: Iterable[dict[str, Any]]) -> Iterable[Kernel]:
    for event in events:
        if event.get("cat") == "kernel":
            launch = event["args"].get("correlation", -1)
            yield Kernel(event["name"], event["ts"], event["dur"], launch)


def _replays(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """Return the kernels of the longest graph's replays, in order."""
    launches: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        launches[kernel.launch].append(kernel)
    size = max((len(launch) for launch in launches.values()), default=0)
    if size < 2:
        return []
    replays = [launch for launch in launches.values() if len(launch) == size]
    for replay in replays:
        replay.sort(key=lambda kernel: kernel.start)
    return sorted(replays, key=lambda replay: replay[0].start)


def write(profiles: Sequence[Profile], path: Path) -> None:
    """Write all kernels of all steps to a CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for profile in profiles:
            writer.writerows(profile.rows())


def report(mode: str, path: Path) -> list[str]:
    """Return the lines of Markdown that tell what a CSV of :func:`write` says."""
    if not path.exists():
        return [f"- {mode}: not profiled, see its log"]
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lines = [] if rows else [f"- {mode}: not profiled, see its log"]
    for batch in dict.fromkeys(row["batch"] for row in rows):
        of_batch = [row for row in rows if row["batch"] == batch]
        first = of_batch[0]
        lines += [
            "",
            f"{first['mode']}, {batch} sequences: a step every {first['step_us']} µs, its CUDA"
            f" graph {first['replay_us']} µs (while the profiler ran):",
            "",
            "| kernel | calls | µs |",
            "|---|---|---|",
            *(f"| `{r['kernel']}` | {r['calls']} | {r['us']} |" for r in of_batch[:_SHOWN]),
            "",
        ]
    return lines
