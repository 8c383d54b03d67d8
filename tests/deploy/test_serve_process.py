"""One supervised child: restarted, given up on, and ended with its whole group and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from taut_deploy.errors import WorkerError
from taut_deploy.serve.process import ChildSpec, RestartPolicy, SupervisedProcess

QUICK = RestartPolicy(first_backoff_s=0.05, last_backoff_s=0.2, healthy_after_s=60.0)
SLEEP = "import time; print('up', flush=True); time.sleep(60)"
GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
print(child.pid, flush=True)
time.sleep(60)
"""
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True)\n"
DEAF += "while True: time.sleep(1)"


@pytest.fixture
def supervise(tmp_path):
    """Makes a supervised child running a Python script; keeps what it said."""

    def make(code: str, grace_s: float = 5.0, policy: RestartPolicy = QUICK, **environment: str):
        argv = (sys.executable, "-c", code)
        spec = ChildSpec("child", argv, environment, tmp_path / "logs" / "child.log", grace_s)
        said: list[str] = []
        return SupervisedProcess(spec, said.append, policy), said

    return make


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


def log_of(process: SupervisedProcess) -> list[str]:
    return process.spec.log.read_text().split() if process.spec.log.exists() else []


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_child_that_dies_is_started_again_with_growing_waits(supervise):
    process, said = supervise(SLEEP)
    process.was_ready = True
    task = asyncio.create_task(process.run())
    pids: list[int] = []
    for run in range(3):
        await until(lambda run=run: len(log_of(process)) == run + 1, "the child prints 'up'")
        pids.append(process.pid)
        os.kill(process.pid, signal.SIGKILL)
    await until(lambda: len(log_of(process)) == 4, "the child runs a fourth time")
    assert len(set(pids)) == 3
    assert process.restarts == 3
    assert [line.split("; ")[0] for line in said] == ["child ended with signal SIGKILL"] * 3
    last = process.pid
    await stop(task)
    assert not alive(last)


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """What the supervisor waited, in seconds; it takes no time."""
    waited: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        await real(0)

    monkeypatch.setattr("taut_deploy.serve.process.asyncio.sleep", sleep)
    return waited


async def test_waits_double_up_to_the_longest(supervise, waits):
    process, _ = supervise("raise SystemExit(3)", policy=RestartPolicy(1.0, 5.0, 60.0, 6))
    with pytest.raises(WorkerError):
        await process.run()
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]


async def test_a_child_that_worked_long_enough_starts_the_waits_afresh(supervise, waits):
    process, _ = supervise("raise SystemExit(3)", policy=RestartPolicy(1.0, 5.0, 0.0, 5))
    with pytest.raises(WorkerError):
        await process.run()
    assert waits == [1.0] * 4


async def test_a_child_never_ready_is_given_up_on_naming_its_log(supervise):
    process, said = supervise("import sys; print('noise'); sys.exit('no such model: x')")
    with pytest.raises(WorkerError, match=r"child ended 3 times before it was ready: .*such model"):
        await process.run()
    assert process.restarts == 2
    assert said[0].startswith("child ended with exit code 1")
    process, _ = supervise("raise SystemExit(3)")
    with pytest.raises(WorkerError, match=r"full log: .*child\.log"):
        await process.run()


async def test_a_child_that_refuses_its_arguments_is_not_asked_again(supervise):
    process, _ = supervise("import sys; print('error: unknown: --nope'); sys.exit(2)")
    with pytest.raises(WorkerError, match=r"child cannot start as asked: error: unknown: --nope"):
        await process.run()
    assert process.restarts == 0


async def test_a_child_that_was_ready_is_never_given_up_on(supervise):
    process, _ = supervise("raise SystemExit(3)")
    process.was_ready = True
    task = asyncio.create_task(process.run())
    await until(lambda: process.restarts > 4, "restarts go on")
    assert not task.done()
    await stop(task)


@pytest.fixture
def bystander():
    """A process that is none of the supervisor's business."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


async def test_stopping_ends_the_whole_group_and_nothing_else(supervise, bystander):
    process, _ = supervise(GRANDCHILD)
    task = asyncio.create_task(process.run())
    await until(lambda: log_of(process), "the grandchild's pid is printed")
    child, grandchild = process.pid, int(log_of(process)[0])
    assert os.getpgid(grandchild) == child != os.getpgid(0)
    await stop(task)
    await until(lambda: not alive(child) and not alive(grandchild), "both are gone")
    assert bystander.poll() is None


async def test_what_a_dead_child_leaves_behind_is_ended_before_the_restart(supervise):
    code = GRANDCHILD.replace("time.sleep(60)\n", "sys.exit(1)\n")
    process, _ = supervise(code)
    with pytest.raises(WorkerError):
        await process.run()
    orphans = [int(word) for word in log_of(process) if word.isdigit()]
    assert len(orphans) == 3
    await until(lambda: not any(map(alive, orphans)), "no orphan is left")


async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(supervise):
    process, _ = supervise(DEAF, grace_s=0.3)
    task = asyncio.create_task(process.run())
    await until(lambda: log_of(process) == ["deaf"], "the child ignores SIGTERM")
    pid, started = process.pid, time.monotonic()
    await stop(task)
    assert time.monotonic() - started >= 0.3
    assert not alive(pid)


async def test_a_child_that_is_not_serving_yet_gets_the_short_grace(supervise):
    process, _ = supervise(DEAF, grace_s=60, policy=RestartPolicy(startup_grace_s=0.3))
    task = asyncio.create_task(process.run())
    await until(lambda: log_of(process) == ["deaf"], "the child ignores SIGTERM")
    started = time.monotonic()
    await stop(task)
    assert 0.3 <= time.monotonic() - started < 10


async def test_a_serving_child_gets_the_whole_grace(supervise):
    process, _ = supervise(DEAF, grace_s=1.0, policy=RestartPolicy(startup_grace_s=0.1))
    task = asyncio.create_task(process.run())
    await until(lambda: log_of(process) == ["deaf"], "the child ignores SIGTERM")
    process.mark_ready()
    started = time.monotonic()
    await stop(task)
    assert time.monotonic() - started >= 1.0


async def test_a_child_that_obeys_is_given_time_to_finish(supervise):
    code = "import signal, sys, time\n"
    code += "def end(*_): time.sleep(0.3); print('drained', flush=True); sys.exit(0)\n"
    code += "signal.signal(15, end); print('up', flush=True)\n"
    code += "while True: time.sleep(0.05)"
    process, _ = supervise(code)
    task = asyncio.create_task(process.run())
    await until(lambda: log_of(process) == ["up"], "the child is up")
    await stop(task)
    assert log_of(process) == ["up", "drained"]


async def test_stopping_between_two_runs_signals_nobody(supervise, monkeypatch):
    """The number of a process that is gone may belong to a stranger by then."""
    process, said = supervise("raise SystemExit(3)", policy=RestartPolicy(30.0, 30.0))
    task = asyncio.create_task(process.run())
    await until(lambda: said, "the child ended and its restart is waited for")
    assert process.pid is None
    signalled: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, _number: signalled.append(pid))
    await stop(task)
    assert signalled == []


async def test_the_environment_is_added_to_ours(supervise, monkeypatch):
    monkeypatch.setenv("TAUT_TEST_OURS", "a")
    code = "import os, time; e = os.environ; print(e['TAUT_TEST_OURS'], e['ADDED'], flush=True)\n"
    process, _ = supervise(code + "time.sleep(60)", ADDED="b")
    task = asyncio.create_task(process.run())
    await until(lambda: log_of(process) == ["a", "b"], "both variables are seen")
    await stop(task)
