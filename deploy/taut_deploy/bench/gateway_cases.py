"""The cases of ``taut bench gateway``: a load, what it yields, and when a result is void.

A case gets a running system (or none: the direct row) and a mock engine, and returns figures.
Rates are per CPU-second of the system's whole process tree, so they hold on a shared machine;
``system_cores`` and ``harness_cores`` say how busy each side was, to show who was the limit.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import random
import resource
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from taut_deploy.bench.gateway_load import (
    HOST,
    ClosedLoop,
    OpenLoop,
    Single,
    Tally,
    Visitor,
    chat_body,
    request_bytes,
)
from taut_deploy.bench.gateway_process import Running
from taut_deploy.errors import WorkerError

Figures = dict[str, float]
CHAT = "/v1/chat/completions"
CONNECTIONS = 32
STREAMS = 100
OPEN_RATE = 200.0
LEAVERS = 200
LEAVERS_AT_ONCE = 5
FIRST_EVENTS_S = 30.0
LEFT_UNSEEN_S = 5.0
"""A worker that was not told within this time counts as never told."""


@dataclass(frozen=True)
class Stage:
    """One system under one engine.

    Attributes:
        port: of the system, or of the engine for the direct row.
        engine: the mock engine's process.
        engine_port: its first port, for ``/mock/…``.
        system: the process under measurement; None for the direct row.
        headers: that the system wants.
        seconds: length of a timed load.
        seed: of the round.
    """

    port: int
    engine: Running
    engine_port: int
    system: Running | None
    headers: Mapping[str, str]
    seconds: float
    seed: int

    def chat(self, prompt_bytes: int, *, stream: bool, mark: str = "") -> bytes:
        """Return the bytes of a chat request to the system."""
        return request_bytes(chat_body(prompt_bytes, stream, mark), self.headers, CHAT)

    def rss_mb(self) -> float:
        """Return the system's resident memory in MB, NaN for the direct row."""
        return self.system.rss_mb() if self.system else math.nan

    def behave(self, **changes: float) -> None:
        """Set the engine's behaviour."""
        defaults = {"ttft_s": 0.0, "itl_s": 0.0, "chunks": 4}
        call(
            self.engine_port,
            "POST",
            "/mock/behaviour",
            json.dumps({**defaults, **changes}, allow_nan=False),
        )


@dataclass(frozen=True)
class Case:
    """One line of the report.

    Attributes:
        name: as on the command line.
        title: for people.
        run: measures.
        headline: the figure that the bars speak about, and its unit.
        unit: of the headline.
        higher_is_better: direction.
    """

    name: str
    title: str
    run: Callable[[Stage], Awaitable[Figures]]
    headline: str
    unit: str
    higher_is_better: bool


def call(
    port: int, method: str, path: str, body: str = "", headers: Mapping[str, str] | None = None
) -> bytes:
    """Make one small request outside the measured load.

    Raises:
        WorkerError: no answer, or not 200.
    """
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    try:
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, http.client.HTTPException) as problem:
        raise WorkerError(f"{path} on port {port}: {type(problem).__name__}") from problem
    finally:
        connection.close()
    if answer.status != 200:
        raise WorkerError(f"{path} on port {port}: answered {answer.status}")
    return content


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that ``share`` of the values do not exceed; NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _timed(stage: Stage, load: Awaitable[Tally]) -> tuple[Tally, Figures]:
    """Run a load between two readings of the clocks."""
    system = stage.system
    wall, harness = time.monotonic(), _cpu() + stage.engine.cpu_seconds()
    spent = system.cpu_seconds() if system else 0.0
    tally = await load
    spent = system.cpu_seconds() - spent if system else math.nan
    harness = _cpu() + stage.engine.cpu_seconds() - harness
    wall = time.monotonic() - wall
    return tally, {
        "cpu_s": spent,
        "system_cores": spent / wall,
        "harness_cores": harness / wall,
        "failed": float(tally.failed),
        "done_per_s": tally.done / wall,
        "events_per_s": tally.events / wall,
    }


async def _whole(stage: Stage, prompt_bytes: int) -> Figures:
    stage.behave()
    request = stage.chat(prompt_bytes, stream=False)
    await ClosedLoop(stage.port, request).run(4, min(0.5, stage.seconds))
    tally, figures = await _timed(
        stage, ClosedLoop(stage.port, request).run(CONNECTIONS, stage.seconds)
    )
    return {
        **figures,
        "per_cpu_s": tally.done / figures["cpu_s"],
        "p50_ms": percentile(tally.latencies, 0.50) * 1e3,
        "p99_ms": percentile(tally.latencies, 0.99) * 1e3,
    }


async def small(stage: Stage) -> Figures:
    """800-byte prompts, whole answers, closed loop."""
    return await _whole(stage, 800)


async def large(stage: Stage) -> Figures:
    """128 KiB prompts, whole answers, closed loop."""
    return await _whole(stage, 128 * 1024)


async def paced(stage: Stage) -> Figures:
    """100 streams, a chunk every 20 ms each."""
    stage.behave(itl_s=0.02, chunks=500)
    loop = ClosedLoop(stage.port, stage.chat(800, stream=True))
    tally, figures = await _timed(stage, loop.run(STREAMS, stage.seconds))
    return {**figures, "per_cpu_s": tally.events / figures["cpu_s"]}


async def added_latency(stage: Stage) -> Figures:
    """200 requests a second at fixed times, whole answers."""
    stage.behave()
    load = OpenLoop(stage.port, stage.chat(800, stream=False))
    tally, figures = await _timed(stage, load.run(OPEN_RATE, stage.seconds))
    return {
        **figures,
        "p50_ms": percentile(tally.latencies, 0.50) * 1e3,
        "p99_ms": percentile(tally.latencies, 0.99) * 1e3,
        "lag_p99_ms": percentile(tally.lags, 0.99) * 1e3,
    }


async def _disconnect(stage: Stage, *, stream: bool) -> Figures:
    """Ask, leave while the worker works, and see when the worker's connection closes."""
    stage.behave(ttft_s=0.0 if stream else 30.0, itl_s=0.05, chunks=1000)
    call(stage.engine_port, "GET", "/mock/aborts")
    chance = random.Random(stage.seed)  # noqa: S311 - waits, not secrets
    left: dict[str, float] = {}
    gate = asyncio.Semaphore(LEAVERS_AT_ONCE)

    async def leave(index: int) -> None:
        mark = f"{'stream' if stream else 'whole'}-{index}"
        async with gate:
            visitor = await Single().ask(stage.port, stage.chat(800, stream=stream, mark=mark))
            try:
                if stream and visitor.first_event is not None:
                    await asyncio.wait_for(visitor.first_event, 10)
                await asyncio.sleep(chance.uniform(0.05, 0.15))
                if visitor.waiting:  # neither answered nor lost: there is something to leave
                    left[mark] = time.monotonic()
            finally:
                visitor.transport.abort()
            await asyncio.sleep(0.02)

    ends = await asyncio.gather(*map(leave, range(LEAVERS)), return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, OSError):
            raise end
    seen: dict[str, float] = {}
    deadline = time.monotonic() + LEFT_UNSEEN_S
    while len(seen) < len(left) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        seen.update(dict(json.loads(call(stage.engine_port, "GET", "/mock/aborts"))))
    # Who left before the request had reached a worker left nothing to close.
    never = len(left.keys() & set(json.loads(call(stage.engine_port, "GET", "/mock/open"))))
    delays = [(seen[mark] - at) * 1e3 for mark, at in left.items() if mark in seen]
    delays += [math.inf] * never
    return {
        "p50_ms": percentile(delays, 0.50),
        "p99_ms": percentile(delays, 0.99),
        "never_closed": float(never),
        "unreached": float(len(left) - len(delays)),
        "failed": float(LEAVERS - len(left)),
    }


async def disconnect_whole(stage: Stage) -> Figures:
    """A client leaves before its whole answer."""
    return await _disconnect(stage, stream=False)


async def disconnect_stream(stage: Stage) -> Figures:
    """A client leaves in the middle of its stream."""
    return await _disconnect(stage, stream=True)


def held_streams(count: int) -> Callable[[Stage], Awaitable[Figures]]:
    """Return a case that holds ``count`` streams of one chunk a second."""

    async def hold(stage: Stage) -> Figures:
        stage.behave(itl_s=1.0, chunks=600)
        request = stage.chat(800, stream=True)
        visitors: list[Visitor] = []
        for begin in range(0, count, 100):
            asked = (Single().ask(stage.port, request) for _ in range(min(100, count - begin)))
            found = await asyncio.gather(*asked, return_exceptions=True)
            visitors += [one for one in found if isinstance(one, Visitor)]
        firsts = [visitor.first_event for visitor in visitors if visitor.first_event is not None]
        if not firsts:
            raise WorkerError("it took no connection")
        await asyncio.wait(firsts, timeout=FIRST_EVENTS_S)
        rss = [stage.rss_mb()]
        for _ in range(max(2, math.ceil(stage.seconds))):
            await asyncio.sleep(1)
            rss.append(stage.rss_mb())
        alive = sum(visitor.waiting and visitor.events >= 2 for visitor in visitors)
        for visitor in visitors:
            visitor.load.tally.open = False
            visitor.transport.abort()
        await asyncio.sleep(0.5)
        return {"rss_mb": max(rss), "open": float(alive), "failed": float(count - alive)}

    return hold


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case("small", "800-byte prompts, 32 connections", small, "per_cpu_s", "req/CPU-s", True),
        Case("large", "128 KiB prompts, 32 connections", large, "per_cpu_s", "req/CPU-s", True),
        Case("sse", "100 streams paced at 20 ms", paced, "per_cpu_s", "chunks/CPU-s", True),
        Case("latency", "whole answers at 200 req/s", added_latency, "p50_ms", "ms p50", False),
        Case(
            "disconnect-whole",
            "client leaves before a whole answer → worker closed",
            disconnect_whole,
            "p99_ms",
            "ms p99",
            False,
        ),
        Case(
            "disconnect-stream",
            "client leaves a stream → worker closed",
            disconnect_stream,
            "p99_ms",
            "ms p99",
            False,
        ),
        Case("streams-2000", "2,000 open streams", held_streams(2000), "rss_mb", "MB RSS", False),
        Case("streams-5000", "5,000 open streams", held_streams(5000), "rss_mb", "MB RSS", False),
    )
}
IDLE = "idle"
"""The case that every run has: resident memory after the start, and how long that took."""
