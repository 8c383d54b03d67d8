"""A rehearsed rollout: real workers, gateway and requests, and a candidate with a known harm.

The harmed candidate goes first and is to be rolled back; the candidate itself is then to climb to
all traffic. Whether the guard's bounds tell the two apart on this model is what the run shows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from taut_deploy.bench.rollout_fleet import CANDIDATE, HARMED, MODEL, Member, gateway_file
from taut_deploy.bench.rollout_page import photograph
from taut_deploy.bench.rollout_traffic import Load, Traffic
from taut_deploy.cache.golden_prompt import ask_until_ready
from taut_deploy.errors import WorkerError
from taut_deploy.files import write_text_atomically
from taut_deploy.ports import free_port
from taut_deploy.progress import Say
from taut_deploy.serve.one_worker import until_ready
from taut_deploy.serve.process import RestartPolicy, SupervisedProcess
from taut_deploy.serve.supervise import gateway_child, is_ready

EXPECTED = {HARMED: "rolled_back", CANDIDATE: "complete"}
"""Candidate → how its rollout is to end; in this order."""
_ENDED = ("rolled_back", "complete", "manual")
_POLL_S = 0.25
_GATEWAY_START_S = 60.0
_ADMIN_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Plan:
    """What is rehearsed.

    Args:
        context: tokens.
        sections: ``guard`` and ``rollout`` of the gateway, as the user wants them.
        load: what clients ask.
        limit_s: longest rollout of one candidate, seconds.
        start_s: longest start of one worker, seconds.
        output: folder of everything that is left.
    """

    context: int
    sections: dict[str, Any]
    load: Load
    limit_s: float
    start_s: float
    output: Path

    @property
    def journal(self) -> Path:
        """Folder of the audit log."""
        return self.output / "rollout"


@dataclass
class Rehearsal:
    """What came of it.

    Args:
        gateway: its file.
        rollouts: one report for each candidate, by name.
        traffic: what clients were answered.
        history: the audit log, oldest line first, and its newest hash.
        pages: pictures of the operator's page.
        seconds: from the first request to the last.
    """

    gateway: dict[str, Any]
    rollouts: dict[str, dict[str, Any]] = field(default_factory=dict)
    traffic: dict[str, Any] = field(default_factory=dict)
    history: dict[str, Any] = field(default_factory=dict)
    pages: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def as_expected(self) -> bool:
        """Whether every rollout ended as it was to, and no client saw a failure."""
        ended = {name: told["phase"] for name, told in self.rollouts.items()}
        return ended == EXPECTED and not self.traffic["failures"]


async def rehearse(plan: Plan, members: Sequence[Member], say: Say) -> Rehearsal:
    """Start everything, let both candidates run, stop everything.

    Args:
        plan: what is rehearsed.
        members: baseline, candidate and the harmed candidate.
        say: prints one line for the user.

    Raises:
        WorkerError: a process ended or was not ready in time, or the gateway refuses a command.
    """
    ports = free_port(), free_port()
    content = gateway_file(members, plan.context, plan.sections, ports, plan.journal)
    found = Rehearsal(content)
    async with _started(plan, members, content, say):
        url, admin_url = (f"http://127.0.0.1:{port}" for port in ports)
        traffic = Traffic(url, MODEL, plan.load)
        began = time.monotonic()
        async with httpx.AsyncClient(base_url=admin_url, timeout=_ADMIN_TIMEOUT_S) as client:
            async with traffic.running():
                for name in EXPECTED:
                    found.rollouts[name] = await _roll_out(client, name, traffic, plan, say)
                    page = plan.output / f"ui-{name}.png"
                    if await asyncio.to_thread(photograph, f"{admin_url}/ui", page, say):
                        found.pages.append(page.name)
            found.history = await _ask(client, "GET", "/history?limit=10000")
        found.seconds = time.monotonic() - began
        found.traffic = traffic.as_json()
    return found


@asynccontextmanager
async def _started(
    plan: Plan, members: Sequence[Member], content: dict[str, Any], say: Say
) -> AsyncIterator[None]:
    """Run workers and gateway; who ends later is started again, as ``taut serve`` does."""
    configuration = plan.output / "gateway.yaml"
    write_text_atomically(configuration, yaml.safe_dump(content, sort_keys=False))
    policy = RestartPolicy(failures_before_ready=1)
    running: list[asyncio.Task[None]] = []
    try:
        # One after the other: vLLM measures how much memory is free while it starts.
        for member in members:
            say(f"starting the worker {member.name}; log in {member.child.log}")
            process = SupervisedProcess(member.child, say, policy)
            running.append(asyncio.create_task(process.run()))
            ready = ask_until_ready(member.url, MODEL, member.golden)
            await _ready(process, running[-1], ready, plan.start_s)
        child = gateway_child(configuration, plan.output)
        gateway = SupervisedProcess(child, say, policy)
        running.append(asyncio.create_task(gateway.run()))
        url = f"http://127.0.0.1:{content['listen']['port']}/health/ready"
        await _ready(gateway, running[-1], _until_green(url), _GATEWAY_START_S)
        yield
    finally:
        # The gateway first: it lets live streams finish while workers still run.
        for task in reversed(running):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _ready(
    process: SupervisedProcess,
    run: asyncio.Task[None],
    wait: Coroutine[Any, Any, object],
    limit_s: float,
) -> None:
    spec = process.spec
    late = f"{spec.name}: not ready within {limit_s:g} s (log: {spec.log}); give a longer --start-s"
    await until_ready(process, run, wait, limit_s, late)


async def _until_green(url: str) -> None:
    while not await asyncio.to_thread(is_ready, url):  # noqa: ASYNC110 - it is another process
        await asyncio.sleep(_POLL_S)


async def _roll_out(
    client: httpx.AsyncClient, name: str, traffic: Traffic, plan: Plan, say: Say
) -> dict[str, Any]:
    """Start a candidate's rollout and follow it to its end, or to the time limit."""
    before = sum(traffic.answered.values()), traffic.answered[name]
    began = time.monotonic()
    await _ask(client, "POST", "/start", {"model": MODEL, "candidate": name})
    course: list[dict[str, Any]] = []
    while True:
        (report,) = (await _ask(client, "GET", ""))["rollouts"]
        seconds = round(time.monotonic() - began, 2)
        step = {"phase": report["phase"], "percent": report["percent"], "why": report["why"]}
        if not course or {**course[-1], "seconds": 0} != {**step, "seconds": 0}:
            course.append({"seconds": seconds, **step})
            say(f"{name}: {step['phase']} at {step['percent']:g} %: {step['why']}")
        if report["phase"] in _ENDED or seconds > plan.limit_s:
            break
        await asyncio.sleep(_POLL_S)
    if report["phase"] not in _ENDED:
        say(f"{name}: not over within {plan.limit_s:g} s; it waits: {report['next']}")
        stop = {"model": MODEL, "why": f"the rehearsal's {plan.limit_s:g} s are over"}
        await _ask(client, "POST", "/rollback", stop)
    (evidence,) = [told for told in report["evidence"] if told["variant"] == name]
    return {
        "expected": EXPECTED[name],
        "phase": report["phase"],
        "waits": report["next"],
        "seconds": seconds,
        "highest_percent": max(step["percent"] for step in course),
        "course": course,
        "evidence": evidence,
        "answered": sum(traffic.answered.values()) - before[0],
        "answered_by_it": traffic.answered[name] - before[1],
    }


async def _ask(client: httpx.AsyncClient, method: str, path: str, body: Any = None) -> Any:
    try:
        answer = await client.request(method, f"/admin/rollout{path}", json=body)
    except httpx.HTTPError as error:
        raise WorkerError(f"the gateway does not answer ({type(error).__name__})") from error
    if answer.status_code != httpx.codes.OK:
        raise WorkerError(f"the gateway refuses {method} {path}: {answer.text[:300]}")
    return answer.json()
