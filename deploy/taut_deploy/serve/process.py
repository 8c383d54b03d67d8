"""One supervised child process: its own process group, restarted with backoff, ended with everything it started."""

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from taut_deploy.errors import WorkerError

_FIRST_BACKOFF_S = 1.0
_LAST_BACKOFF_S = 30.0
# A child that lived this long was working: its next failure starts the backoff afresh.
_HEALTHY_AFTER_S = 60.0
_FAILURES_BEFORE_READY = 3
_PR_SET_PDEATHSIG = 1

Say = Callable[[str], None]


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

    The child leads its own session, so a terminal's Ctrl-C reaches it only through us, and its group can be
    ended as a whole (vLLM starts an engine process of its own). Cancelling :meth:`run` stops the child.

    Args:
        spec: what to run.
        say: prints one line for the user.
    """

    def __init__(self, spec: ChildSpec, say: Say) -> None:
        self.spec = spec
        self.was_ready = False
        self.restarts = 0
        self._say = say
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id while running."""
        return self._process.pid if self._process is not None else None

    async def run(self) -> None:
        """Start the child and restart it whenever it ends.

        Raises:
            WorkerError: if it failed several times in a row before it was ever ready.
        """
        backoff = _FIRST_BACKOFF_S
        failures = 0
        try:
            while True:
                started = time.monotonic()
                code = await self._run_once()
                failures = 0 if self.was_ready else failures + 1
                if failures >= _FAILURES_BEFORE_READY:
                    raise WorkerError(
                        f"{self.spec.name} ended {failures} times before it was ready: {self._last_line()} "
                        f"(full log: {self.spec.log})"
                    )
                if time.monotonic() - started > _HEALTHY_AFTER_S:
                    backoff = _FIRST_BACKOFF_S
                self.restarts += 1
                self._say(f"{self.spec.name} ended with {_describe(code)}; starting it again in {backoff:.0f} s")
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _LAST_BACKOFF_S)
        finally:
            await self._stop()

    async def _run_once(self) -> int:
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        with self.spec.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.spec.environment},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        code = await self._process.wait()
        # Whatever it left behind (an engine process) would hold memory and the port.
        _signal_group(self._process.pid, signal.SIGKILL)
        return code

    async def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), self.spec.grace_s)
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
