"""Processes of a run: how they begin, and that they end with the run."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext

from taut_deploy.idle_threads import sleeping

# What takes most of a process's first seconds; of this package, so that it can be imported there.
_IMPORTED = ("taut_deploy.compress.driver", "taut_deploy.compress.train.distil")


def context_for(devices: Iterable[str]) -> ForkServerContext | SpawnContext:
    """Return the context of multiprocessing for processes that compute on these devices.

    A plain fork of this process would have none of torch's threads. On a CPU, processes are forks
    of one that has imported what they need and computes nothing: six CPU seconds for all, not for
    each. Where a library asks for cards as it is imported, a fork could not use them: those begin
    anew.

    Args:
        devices: names as torch has them, such as ``cpu`` or ``cuda:1``.
    """
    if any(device != "cpu" for device in devices):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    with sleeping():
        forkserver.ensure_running()
    return context


def end_with_parent() -> None:
    """Let this process end when its parent does: a killed run leaves none that still writes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.join,), daemon=True).start()


def _end_after(parent_ended: Callable[[], None]) -> None:
    parent_ended()
    os._exit(1)
