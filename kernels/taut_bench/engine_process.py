"""An engine in a process of its own that is asked for one cell at a time.

Engines of several modes start side by side and take turns: one measures, the others wait for what
they are asked. So both see the same minutes of the same card, in both orders.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from taut_bench.engine_measure import Cell, Engine, Settings
from taut_bench.engine_modes import environment

_LOOK_S = 0.2


class EngineEndedError(Exception):
    """An engine's process ended before it answered; the text is its exit status."""


def in_a_name(mode: str) -> str:
    """Return a mode as names of files have it: a borrowed machine hands back none with a ``+``."""
    return mode.replace("+", "-")


class EngineProcess:
    """A mode's engine, started."""

    def __init__(
        self, checkpoint: Path, mode: str, settings: Settings, directory: Path, profile: bool
    ) -> None:
        """Start it, and return before it is ready.

        Args:
            checkpoint: what it loads.
            mode: one of :data:`.engine_modes.MODES` or ``HUMMING``.
            settings: of the run.
            directory: of its log, its kernel record and its profile.
            profile: write decode steps by kernel when it is closed.
        """
        self.mode = mode
        self.log = directory / f"engine-{in_a_name(mode)}.log"
        self.by_kernel = directory / f"engine-{in_a_name(mode)}-profile.csv"
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "taut_bench.engine", "--worker", mode]
        command += ["--checkpoint", str(checkpoint), *settings.arguments()]
        command += ["--output", str(directory), "--channel", str(theirs.fileno())]
        if profile:
            command += ["--profile-to", str(self.by_kernel)]
        record = directory / f"engine-{in_a_name(mode)}-kernels.json"
        with self.log.open("w") as sink, theirs:
            self._process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment(mode, record),
                pass_fds=(theirs.fileno(),),
            )
        self._channel = Connection(ours.detach())

    def _answer(self) -> Any:
        try:
            while not self._channel.poll(_LOOK_S):
                if self._process.poll() is not None and not self._channel.poll(0):
                    raise EngineEndedError(str(self._process.returncode))
            return self._channel.recv()
        except (EOFError, ConnectionError):
            raise EngineEndedError(str(self._process.wait())) from None

    def ready(self) -> float:
        """Wait until it takes prompts; return the seconds of its start, others beside it."""
        return float(self._answer())

    def measure(self, context: int, batch: int) -> Cell:
        """Return what a cell took.

        Args:
            context: tokens of a prompt.
            batch: prompts at once.

        Raises:
            EngineEndedError: before it answered.
        """
        try:
            self._channel.send((context, batch))
        except OSError:
            raise EngineEndedError(str(self._process.wait())) from None
        return Cell(*self._answer())

    def close(self) -> None:
        """Let it write its profile, and end.

        Raises:
            EngineEndedError: with another status than 0.
        """
        with contextlib.suppress(OSError):  # it has ended: its status says how
            self._channel.send(None)
        self._channel.close()
        if status := self._process.wait():
            raise EngineEndedError(str(status))


def serve(
    channel: int,
    checkpoint: Path,
    mode: str,
    settings: Settings,
    profile: Path | None,
) -> None:
    """Be the process: start an engine, and measure what is asked for through a channel.

    Args:
        channel: the file descriptor of a socket.
        checkpoint: what the engine loads.
        mode: of the engine.
        settings: of the run.
        profile: the CSV for decode steps by kernel.
    """
    asked = Connection(channel)
    engine = Engine(checkpoint, mode, settings, profiled=profile is not None)
    engine.settle()
    asked.send(engine.start_s)
    while (cell := asked.recv()) is not None:
        asked.send(tuple(engine.measure(*cell)))
    if profile:
        engine.profile(profile)
