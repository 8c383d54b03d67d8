"""One supervised child: a process group of its own, restarted with backoff, ended as a whole."""

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from taut_deploy.errors import WorkerError
from taut_deploy.progress import Say

_PR_SET_PDEATHSIG = 1
_USAGE = 2
"""Exit code of a program that refuses its arguments or files: taut's own, vLLM's, the gateway's."""


@dataclass(frozen=True)
class RestartPolicy:
    """When a child that ended is started again.

    Args:
        first_backoff_s: wait before the first restart, seconds; doubles with each.
        last_backoff_s: longest wait, seconds.
        healthy_after_s: a child that lived this long was working: the wait starts afresh.
        failures_before_ready: ends in a row, before it was ever ready, that are given up on.
        startup_grace_s: longest wait between SIGTERM and SIGKILL for a child that is not serving
            yet: it has no request to finish, and vLLM ignores SIGTERM while it compiles.
    """

    first_backoff_s: float = 1.0
    last_backoff_s: float = 30.0
    healthy_after_s: float = 60.0
    failures_before_ready: int = 3
    startup_grace_s: float = 5.0


_POLICY = RestartPolicy()


@dataclass(frozen=True)
class ChildSpec:
    """What to run.

    Args:
        name: shown to the user, and the log file's stem.
        argv: program and arguments.
        environment: added to this process's environment.
        log: file the child's output is appended to.
        grace_s: seconds between SIGTERM and SIGKILL.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    grace_s: float


class SupervisedProcess:
    """Keeps one child running until told to stop.

    The child leads its own session, so a terminal's Ctrl-C reaches it only through us, and its
    group can be ended as a whole (vLLM starts an engine process of its own). Cancelling :meth:`run`
    stops the child.

    Args:
        spec: what to run.
        say: prints one line for the user.
        policy: when to restart.
    """

    def __init__(self, spec: ChildSpec, say: Say, policy: RestartPolicy = _POLICY) -> None:
        self.spec = spec
        self.was_ready = False
        self.restarts = 0
        self._serving = False
        self._say = say
        self._policy = policy
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id while running."""
        return self._process.pid if self._process is not None else None

    def mark_ready(self) -> None:
        """Note that the child, as it runs now, answers requests."""
        self.was_ready = self._serving = True

    async def run(self) -> None:
        """Start the child and restart it whenever it ends; its log begins anew.

        Raises:
            WorkerError: if it failed several times in a row before it was ever ready, or refused
                its arguments, as it would do again.
        """
        backoff = self._policy.first_backoff_s
        failures = 0
        self.spec.log.unlink(missing_ok=True)
        try:
            while True:
                started = time.monotonic()
                code = await self._run_once()
                failures = 0 if self.was_ready else failures + 1
                if code == _USAGE and not self.was_ready:
                    raise WorkerError(
                        f"{self.spec.name} cannot start as asked: {self._last_line()} "
                        f"(full log: {self.spec.log})"
                    )
                if failures >= self._policy.failures_before_ready:
                    raise WorkerError(
                        f"{self.spec.name} ended {failures} times before it was ready: "
                        f"{self._last_line()} (full log: {self.spec.log})"
                    )
                if time.monotonic() - started > self._policy.healthy_after_s:
                    backoff = self._policy.first_backoff_s
                self.restarts += 1
                self._say(
                    f"{self.spec.name} ended with {_describe(code)}; "
                    f"starting it again in {backoff:.0f} s"
                )
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, self._policy.last_backoff_s)
        finally:
            await self._stop()

    async def _run_once(self) -> int:
        self._serving = False
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        with self.spec.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A Python child's lines reach the log in the order they were said: with a buffer,
                # what it prints lands behind the error it ended with, which is what we show.
                env={"PYTHONUNBUFFERED": "1", **os.environ, **self.spec.environment},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        code = await self._process.wait()
        # Whatever it left behind (an engine process) would hold memory and the port.
        _signal_group(self._process.pid, signal.SIGKILL)
        # From here on the kernel may give its number to a stranger.
        self._process = None
        return code

    async def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            grace_s = self.spec.grace_s
            if not self._serving:
                grace_s = min(grace_s, self._policy.startup_grace_s)
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), grace_s)
        _signal_group(process.pid, signal.SIGKILL)
        await process.wait()

    def _last_line(self) -> str:
        lines = self.spec.log.read_text(encoding="utf-8", errors="replace").splitlines()
        meaningful = [line.strip() for line in lines if line.strip()]
        return meaningful[-1][-300:] if meaningful else "it printed nothing"


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _die_with_parent() -> None:
    # If taut itself is killed, its children get SIGTERM instead of living on unseen (Linux only).
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _describe(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
