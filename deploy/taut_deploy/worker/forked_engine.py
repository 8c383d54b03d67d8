"""The engine's process as a fork of one that has vLLM imported; by itself it imports vLLM anew.

vLLM starts its engine by ``spawn``: on a CPU OpenMP's threads and the locks of a running server do
not survive a fork. Here the fork is made right behind the imports, before anything computes or
runs a thread of its own, and waits (it is multiprocessing's fork server). The engine is a fork of
that one, with the environment that vLLM has written by then, as ``spawn`` would hand it on.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing import context, forkserver, resource_tracker, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar, NoReturn


class EngineProcess(context.ForkServerProcess):
    """A process that begins in the environment of its starter, as ``spawn`` has it."""

    def start(self) -> None:
        """Start it with the environment of now."""
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        """Run the target, as a process that was spawned."""
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        # What is equal stays where it is: the engine's title is written beside it.
        os.environ.update({k: v for k, v in self._environment.items() if os.environ.get(k) != v})
        # The fork server hears no SIGTERM: it ends with those it serves. An engine does.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        multiprocessing.set_start_method("spawn", force=True)
        super().run()


class EngineContext(context.ForkServerContext):
    """A context of multiprocessing whose processes are forks of the one that waits."""

    Process: ClassVar[type[BaseProcess]] = EngineProcess  # type: ignore[assignment]


def fork_here() -> None:
    """Fork this process; the fork waits for engines to start, and ends when they and this one have.

    To be called once, before this process has threads.
    """
    resource_tracker.ensure_running()
    # Those of this process stay open; what the call opens below is its own, but for two.
    before = _open_files()

    def fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        return os.fork() or _serve({*before, *passfds}, *passfds)

    started_anew = util.spawnv_passfds
    util.spawnv_passfds = fork
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = started_anew


def _serve(kept: set[int], listener: int, alive: int) -> NoReturn:
    """Be the fork server; nothing of the process that it was forked from goes on here."""
    try:
        for file in _open_files() - kept:
            with contextlib.suppress(OSError):  # what listed them is closed already
                os.close(file)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)


def _open_files() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir()}
