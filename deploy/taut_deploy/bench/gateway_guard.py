"""``taut bench gateway --guard``: what the live guard costs the gateway that has it on.

One gateway gets the same load in turn: off, on, on, off. The guard is taken away and given back by
a reload that leaves the model without its ``baseline``. So a drift of the machine hits both, and
each round gives two pairs in both orders. Two processes side by side will not do: started alike,
without any guard, they differ by a tenth in CPU time for as long as they live. A turn ends when its
last comparisons are done; CPU time is the process's own clock, comparisons included, divided by the
answers to clients.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import uvloop
import yaml

from taut_deploy.bench.gateway import SETTLE_S, WORKERS, answers, describe_host, split_cores
from taut_deploy.bench.gateway_cases import Stage, call, percentile
from taut_deploy.bench.gateway_load import OpenLoop
from taut_deploy.bench.gateway_process import Running, start_engine
from taut_deploy.bench.gateway_systems import taut
from taut_deploy.errors import WorkerError
from taut_deploy.ports import free_port
from taut_deploy.progress import Say

SHARE = 0.05
ORDERS = ((False, True), (True, False))
"""Guard off first, then guard on first."""
LAST_COMPARISONS_S = 2.0
_CHARGED = re.compile(rb"^taut_guard_cpu_seconds_total ([\d.e+-]+)$", re.M)
_DRAWN = re.compile(rb'^taut_guard_answers_total\{.*result="(\w+)".*\} ([\d.e+]+)$', re.M)
_ROOM: Mapping[str, object] = {"concurrency": 16, "max_queued": 1000}
"""For all that is drawn."""


@dataclass(frozen=True)
class Load:
    """What both gateways are asked.

    Attributes:
        name: for tables.
        title: for people.
        rate: requests a second, at fixed times.
        stream: whether answers are streams.
        behaviour: of the mock engine.
    """

    name: str
    title: str
    rate: float
    stream: bool
    behaviour: Mapping[str, float]


LOADS = (
    Load(
        "streams",
        "50 streams a second, 64 tokens each, one every 10 ms",
        50.0,
        stream=True,
        behaviour={"ttft_s": 0.05, "itl_s": 0.01, "chunks": 64},
    ),
    Load(
        "whole",
        "200 whole answers a second of 64 tokens, from a worker that answers at once",
        200.0,
        stream=False,
        behaviour={"chunks": 64},
    ),
)


@dataclass(frozen=True)
class Turn:
    """One gateway under one load.

    Attributes:
        cpu_ms: of the gateway's process, for each answer to a client.
        latencies_ms: of the answers, from the write of a request to the last byte.
        failed: requests without a whole answer.
        drawn: result → answers that the guard drew and what came of them.
        charged_ms: CPU time of comparisons as the guard's budget counts it.
    """

    cpu_ms: float
    latencies_ms: Sequence[float]
    failed: int
    drawn: Mapping[str, int]
    charged_ms: float = 0.0


@dataclass(frozen=True)
class Pair:
    """Two turns, one after the other, and which was first."""

    off: Turn
    on: Turn
    on_first: bool

    @property
    def cpu(self) -> float:
        """CPU time with the guard over that without."""
        return self.on.cpu_ms / self.off.cpu_ms


@dataclass
class Compared:
    """What a run found.

    Attributes:
        host: what a figure needs beside it.
        seconds: length of a turn.
        pairs: load → its pairs.
    """

    host: Mapping[str, str]
    seconds: float
    pairs: dict[str, list[Pair]] = field(default_factory=dict)

    def latency(self, load: str, share: float) -> tuple[float, float]:
        """Return a percentile of all latencies in ms, without and with the guard."""
        pairs = self.pairs[load]
        off = [x for pair in pairs for x in pair.off.latencies_ms]
        on = [x for pair in pairs for x in pair.on.latencies_ms]
        return percentile(off, share), percentile(on, share)

    def cpu(self, load: str) -> tuple[float, float, list[float]]:
        """Return median CPU ms of an answer without and with the guard, and the pairs' ratios."""
        pairs = self.pairs[load]
        off, on = ([getattr(p, side).cpu_ms for p in pairs] for side in ("off", "on"))
        return statistics.median(off), statistics.median(on), [pair.cpu for pair in pairs]

    def drawn(self, load: str) -> tuple[int, dict[str, int]]:
        """Return how many clients were answered with the guard on, and what it drew of them."""
        turns = [pair.on for pair in self.pairs[load]]
        results = sorted({name for turn in turns for name in turn.drawn})
        counts = {name: sum(turn.drawn.get(name, 0) for turn in turns) for name in results}
        return sum(len(turn.latencies_ms) for turn in turns), counts

    def comparison_ms(self, load: str) -> tuple[float, float]:
        """Return the CPU ms of a comparison: as both sides differ, and as the guard charged it.

        NaN where nothing was compared.
        """
        pairs = self.pairs[load]
        compared = sum(pair.on.drawn.get("compared", 0) for pair in pairs)
        if not compared:
            return math.nan, math.nan
        more = sum((p.on.cpu_ms - p.off.cpu_ms) * len(p.on.latencies_ms) for p in pairs)
        return more / compared, sum(pair.on.charged_ms for pair in pairs) / compared


def compare(rounds: int, seconds: float, say: Say) -> Compared:
    """Measure.

    Args:
        rounds: each gives a pair in either order.
        seconds: length of a turn.
        say: told of every pair.

    Raises:
        WorkerError: the gateway or the engine does not start, or requests fail.
    """
    own, others = split_cores()
    found = Compared(describe_host(), seconds)
    os.sched_setaffinity(0, others)
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="taut-bench-")))
            gateway = _start(stack, folder, (own, others), seconds)
            for number, load, on_first in _schedule(rounds):
                turns = {on: gateway.turn(load, guarded=on) for on in (on_first, not on_first)}
                pair = Pair(turns[False], turns[True], on_first=on_first)
                found.pairs.setdefault(load.name, []).append(pair)
                say(f"round {number + 1} of {rounds}: {load.name}: CPU x {pair.cpu:.3f}")
    finally:
        os.sched_setaffinity(0, own | others)
    return found


def _schedule(rounds: int) -> Iterator[tuple[int, Load, bool]]:
    for number in range(rounds):
        for load in LOADS:
            for first, _ in ORDERS:
                yield number, load, first


def _start(
    stack: ExitStack, folder: Path, cores: tuple[set[int], set[int]], seconds: float
) -> _Gateway:
    """Start the engine, and a gateway with the guard."""
    workers = [free_port() for _ in range(WORKERS)]
    engine = start_engine(workers, cores[1], folder / "engine.log")
    stack.callback(engine.stop)
    port, admin_port = free_port(), free_port()
    sections = {"guard": {"sample": SHARE, **_ROOM}, "admin": {"port": admin_port}}
    start = taut(folder, folder, workers, port, sections)
    _rewrite(file := Path(start.argv[-1]), guarded=True)
    running = Running("the gateway", start.argv, cores[0], folder / "gateway.log")
    stack.callback(running.stop)
    running.wait(partial(answers, port, start), start.start_limit_s)
    time.sleep(SETTLE_S)
    stage = Stage(port, engine, workers[0], running, start.headers, seconds, seed=0)
    return _Gateway(stage, file, admin_port, running.pid)


@dataclass(frozen=True)
class _Gateway:
    """One gateway whose guard can be taken away.

    Attributes:
        stage: it and its engine.
        file: its configuration.
        admin_port: where it is told to read that again.
        pid: its process.
    """

    stage: Stage
    file: Path
    admin_port: int
    pid: int

    def turn(self, load: Load, *, guarded: bool) -> Turn:
        """Give it one load."""
        stage = self.stage
        _rewrite(self.file, guarded=guarded)
        call(self.admin_port, "POST", "/admin/reload", headers=stage.headers)
        stage.behave(**load.behaviour)
        request = stage.chat(800, stream=load.stream)
        uvloop.run(OpenLoop(stage.port, request).run(load.rate, min(0.5, stage.seconds)))
        time.sleep(LAST_COMPARISONS_S)
        (drawn, charged_s), spent_s = self._counted(), process_seconds(self.pid)
        client = OpenLoop(stage.port, request)
        tally = uvloop.run(client.run(load.rate, stage.seconds, patience_s=5.0))
        time.sleep(LAST_COMPARISONS_S)
        spent_s = process_seconds(self.pid) - spent_s
        if not tally.latencies or tally.failed:
            failures = dict(tally.failures)
            raise WorkerError(f"{load.name}: {tally.failed} requests failed: {failures}")
        counts, now_s = self._counted()
        counts = {name: count - drawn.get(name, 0) for name, count in counts.items()}
        latencies = [seconds * 1e3 for seconds in tally.latencies]
        cpu_ms, charged_ms = spent_s * 1e3 / len(latencies), (now_s - charged_s) * 1e3
        return Turn(cpu_ms, latencies, tally.failed, counts, charged_ms)

    def _counted(self) -> tuple[dict[str, int], float]:
        """Return what the guard has drawn, by result, and the seconds it has charged."""
        text = call(self.stage.port, "GET", "/metrics")
        counts: dict[str, int] = {}
        for name, value in _DRAWN.findall(text):
            counts[name.decode()] = counts.get(name.decode(), 0) + int(float(value))
        charged = _CHARGED.search(text)
        return counts, float(charged[1]) if charged is not None else 0.0


def _rewrite(file: Path, *, guarded: bool) -> None:
    """Have the model guarded or not, and the key allowed to say so while the gateway runs."""
    settings = yaml.safe_load(file.read_text())
    model = settings["models"][0]
    baseline = model["variants"][-1]["name"]
    # A section ``guard`` wants some model with a baseline: nobody asks for this one.
    variants = [
        {**v, "workers": [{**v["workers"][0], "name": f"spare-{v['name']}"}]}
        for v in model["variants"]
    ]
    spare = {**model, "name": "spare", "baseline": baseline, "variants": variants}
    settings["models"] = [{**model, "baseline": baseline if guarded else None}, spare]
    settings["api_keys"][0]["scopes"] = ["inference", "admin"]
    file.write_text(yaml.safe_dump(settings))


def process_seconds(pid: int) -> float:
    """Return the CPU time of a process and all its threads, to the nanosecond.

    ``/proc`` counts in hundredths of a second, too coarse for a turn.

    Args:
        pid: a process of this user.

    Raises:
        WorkerError: it has ended.
    """
    clock = ctypes.c_int()
    if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise WorkerError(f"the process {pid} has ended")
    return time.clock_gettime(clock.value)
