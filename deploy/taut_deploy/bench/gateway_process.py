"""Processes of ``taut bench gateway``: started on given cores, read through ``/proc``, ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from taut_deploy.bench import process_tree
from taut_deploy.errors import WorkerError

STOP_S = 10.0


@contextlib.contextmanager
def _pinned_to(cores: set[int]) -> Iterator[None]:
    """Run on these cores for a moment: a child inherits them before its first thread starts."""
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, ours)


class Running:
    """A process and its descendants.

    Args:
        name: for messages.
        argv: command; a list, never a shell.
        cores: where it and its children may run.
        log: file for its standard output and error.
        environment: added to ours.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        cores: set[int],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.started = time.monotonic()
        with log.open("wb") as sink, _pinned_to(cores):
            self._process = subprocess.Popen(
                list(argv),
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONSAFEPATH": "1", **(environment or {})},
                cwd=log.parent,
                start_new_session=True,
            )
        self._tree = psutil.Process(self._process.pid)

    @property
    def pid(self) -> int:
        """Process id of the root."""
        return self._process.pid

    def cpu_seconds(self) -> float:
        """Return user + system time of the whole tree, ended children included."""
        return process_tree.cpu_seconds(self._tree)

    def rss_mb(self) -> float:
        """Return resident memory of the whole tree in MB (10⁶ bytes)."""
        total = 0
        for member in process_tree.members(self._tree):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += member.memory_info().rss
        return total / 1e6

    def wait(self, ready: Callable[[], bool], limit_s: float) -> float:
        """Wait until ``ready`` holds; return the seconds since the start.

        Raises:
            WorkerError: the process ended or the limit passed; the end of its log is quoted.
        """
        while not ready():
            if self._process.poll() is not None:
                raise WorkerError(f"{self.name} ended at its start: {self._last_words()}")
            if time.monotonic() - self.started > limit_s:
                raise WorkerError(
                    f"{self.name} was not ready within {limit_s:g} s: {self._last_words()}"
                )
            time.sleep(0.01)
        return time.monotonic() - self.started

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:])[-400:] or "it wrote nothing"

    def stop(self) -> None:
        """End the tree: SIGTERM, then SIGKILL to what is left."""
        members = process_tree.members(self._tree)
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        self._process.wait()


def start_engine(
    ports: Sequence[int], cores: set[int], log: Path, *settings: str, strict: bool = False
) -> Running:
    """Start a mock engine and wait until it listens.

    Args:
        ports: where; each is one worker to a gateway.
        cores: where it runs.
        log: its output.
        *settings: ``field=value`` of its behaviour.
        strict: check every request.
    """
    argv = [sys.executable, "-m", "taut_deploy.bench.mock_engine"]
    argv += [word for port in ports for word in ("--port", str(port))]
    argv += [word for setting in settings for word in ("--set", setting)]
    argv += ["--strict"] if strict else []
    engine = Running("the mock engine", argv, cores, log)
    try:
        engine.wait(lambda: b"ready" in log.read_bytes(), 30)
    except WorkerError:
        engine.stop()
        raise
    return engine
