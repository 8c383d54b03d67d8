"""``taut bench gateway``: taut's gateway against its rivals, one pinned core, the same run.

One core is the system's alone; the mock engine and the load generator share the others. A round
starts each system afresh (its start and its idle memory are measured), puts every case to it and
ends it; rounds alternate among the systems in rotating order, so that a drift of the machine hits
all of them. Medians over rounds are reported with their range. The direct row, client to engine
without a gateway, stands beside, and percentiles are never subtracted.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from taut_deploy.bench.gateway_cases import CASES, IDLE, Case, Figures, Stage
from taut_deploy.bench.gateway_process import Running, start_engine
from taut_deploy.bench.gateway_systems import (
    DIRECT,
    NOT_TO_BE_HAD,
    RIVALS,
    TAUT,
    Start,
    System,
    install,
)
from taut_deploy.errors import WorkerError
from taut_deploy.host import cpu_name
from taut_deploy.ports import free_port
from taut_deploy.progress import Say

WORKERS = 3
"""Ports of the mock engine; taut serves one variant from two of them, another from the third."""
SETTLE_S = 1.0
"""Pause between readiness and the reading of idle memory."""
PAUSE_S = 0.5
BACKLOG_S = 30.0
"""Longest wait between two cases for a system that is still busy with the first."""
Found = dict[tuple[str, str], list[Figures]]


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        systems: in the order of the first round.
        cases: of :data:`CASES`.
        rounds: starts of each system.
        seconds: length of each timed load.
        output: folder of the results.
        cache: folder of the rivals' virtual environments.
    """

    systems: Sequence[System]
    cases: Sequence[Case]
    rounds: int
    seconds: float
    output: Path
    cache: Path


@dataclass(frozen=True)
class Cell:
    """One system under one case: every round's figures."""

    system: System
    case: str
    rounds: tuple[Figures, ...]

    def values(self, figure: str) -> list[float]:
        """Return one figure of all rounds that have it."""
        return [found[figure] for found in self.rounds if figure in found]

    def median(self, figure: str) -> float:
        """Return its median; NaN without a round."""
        values = self.values(figure)
        return statistics.median(values) if values else math.nan


@dataclass
class Results:
    """Everything a run found out.

    Attributes:
        host: what a figure needs beside it.
        rounds: starts of each system that were asked for.
        seconds: length of a timed load.
        systems: that were installed, in order.
        found: system and case → the figures of each round.
        cells: the same, in the order of the report.
        not_run: system → why it was not measured, or not to the end.
        failed: system, case and round that broke off, with the reason.
    """

    host: Mapping[str, str]
    rounds: int
    seconds: float
    systems: list[System] = field(default_factory=list)
    found: Found = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def choose(rivals: str, cases: str) -> tuple[list[System], list[Case], dict[str, str]]:
    """Read the command line's lists.

    Args:
        rivals: names with commas; "none" for taut alone.
        cases: names with commas; "all" for every case.

    Returns:
        Systems (direct and taut first), cases, and rivals that cannot be had with the reason.

    Raises:
        WorkerError: an unknown name.
    """
    systems, absent = [DIRECT, TAUT], {}
    for name in filter(None, (part.strip() for part in rivals.split(","))):
        if name == "none":
            continue
        if name in NOT_TO_BE_HAD:
            absent[name] = NOT_TO_BE_HAD[name]
        elif name in RIVALS:
            systems.append(RIVALS[name])
        else:
            known = ", ".join([*RIVALS, *NOT_TO_BE_HAD])
            raise WorkerError(f"--rivals: {name} is unknown; one or more of {known}, or none")
    wanted = list(CASES) if cases == "all" else [part.strip() for part in cases.split(",")]
    for name in wanted:
        if name not in CASES and name != IDLE:
            raise WorkerError(f"--cases: {name} is unknown; one or more of {', '.join(CASES)}, all")
    return systems, [CASES[name] for name in wanted if name != IDLE], absent


def split_cores() -> tuple[set[int], set[int]]:
    """Return the system's core and the others.

    Raises:
        WorkerError: there is only one.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise WorkerError("taut bench gateway needs two CPU cores: one is the system's alone")
    return {cores[0]}, set(cores[1:])


def describe_host() -> dict[str, str]:
    """Return what a figure needs beside it."""
    return {
        "cpu": f"{os.cpu_count()} x {cpu_name()}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "load_average": f"{os.getloadavg()[0]:.1f}",
    }


def measure(plan: Plan, absent: Mapping[str, str], say: Say) -> Results:
    """Run the whole plan.

    Args:
        plan: what to measure.
        absent: rivals that cannot be had.
        say: told of every step.

    Returns:
        The results. A rival that does not install or start is in ``not_run``, a case that breaks
        off in ``failed``; neither ends the run.

    Raises:
        WorkerError: taut itself, or the engine, does not start.
    """
    own, others = split_cores()
    results = Results(describe_host(), plan.rounds, plan.seconds, not_run=dict(absent))
    systems = results.systems = _install(plan, results, say)
    os.sched_setaffinity(0, others)
    try:
        for number in range(plan.rounds):
            shift = number % len(systems)
            for system in [*systems[shift:], *systems[:shift]]:
                if system.name in results.not_run:
                    continue
                say(f"round {number + 1} of {plan.rounds}: {system.name}")
                try:
                    _round(plan, system, number, (own, others), results, say)
                except WorkerError as problem:
                    if system in (TAUT, DIRECT):
                        raise
                    results.not_run[system.name] = str(problem)
    finally:
        os.sched_setaffinity(0, own | others)
    for name in [IDLE, *(case.name for case in plan.cases)]:
        for system in systems:
            rounds = results.found.get((system.name, name))
            if rounds:
                results.cells.append(Cell(system, name, tuple(rounds)))
    for name, reason in results.not_run.items():
        say(f"NOT RUN: {name}: {reason}")
    return results


def _install(plan: Plan, results: Results, say: Say) -> list[System]:
    systems = []
    for system in plan.systems:
        try:
            say(f"{system.name}: {'wants ' + system.packages[0] if system.packages else 'is here'}")
            install(system, plan.cache)
            systems.append(system)
        except WorkerError as problem:
            results.not_run[system.name] = str(problem)
    return systems


def _round(
    plan: Plan,
    system: System,
    number: int,
    cores: tuple[set[int], set[int]],
    results: Results,
    say: Say,
) -> None:
    """Start one system, put every case to it, end it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="taut-bench-")))
        workers = [free_port() for _ in range(WORKERS)]
        engine = start_engine(workers, cores[1], folder / "engine.log")
        stack.callback(engine.stop)
        running, port, headers = None, workers[0], {}
        if system.start is not None:
            port = free_port()
            start = system.start(folder, plan.cache / system.name / "bin", workers, port)
            log = folder / "system.log"
            running = Running(system.name, start.argv, cores[0], log, start.environment)
            stack.callback(running.stop)
            ready_s = running.wait(lambda: answers(port, start), start.start_limit_s)
            time.sleep(SETTLE_S)
            idle = {"rss_mb": running.rss_mb(), "ready_s": ready_s}
            results.found.setdefault((system.name, IDLE), []).append(idle)
            headers = dict(start.headers)
        stage = Stage(port, engine, workers[0], running, headers, plan.seconds, seed=number)
        for case in plan.cases:
            try:
                figures = uvloop.run(case.run(stage))
            except (OSError, WorkerError) as problem:
                line = f"{system.name}, {case.name}, round {number + 1}: {problem!r}"
                results.failed.append(line)
                say(f"FAILED: {line}")
                continue
            results.found.setdefault((system.name, case.name), []).append(figures)
            say(f"{system.name}: {case.name}: {_brief(case, figures)}")
            if running is not None:
                _settle(running)


def _settle(running: Running) -> None:
    """Wait until a system has worked off what a case left behind, so that the next is its own."""
    deadline = time.monotonic() + BACKLOG_S
    spent = running.cpu_seconds()
    while time.monotonic() < deadline:
        time.sleep(PAUSE_S)
        before, spent = spent, running.cpu_seconds()
        if spent - before < 0.1 * PAUSE_S:
            return


def _brief(case: Case, figures: Figures) -> str:
    failed = figures.get("failed", 0.0)
    value = figures.get(case.headline, math.nan)
    text = "done" if math.isnan(value) else f"{value:,.2f} {case.unit}"
    return text + (f", {failed:,.0f} failed" if failed else "")


def answers(port: int, start: Start) -> bool:
    """Tell whether a system serves."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{start.ready_path}", headers=dict(start.headers)
    )
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
