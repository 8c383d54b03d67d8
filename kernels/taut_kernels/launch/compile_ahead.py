"""Compiling side by side what will be launched one after the other.

Triton compiles a form of a kernel where it is first launched. A loaded model has dozens of forms,
each about a second of one core: asked for ahead they take half the time or less.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import triton

from taut_kernels.launch.compile_processes import Compilers

THREADS = min(8, len(os.sched_getaffinity(0)))
"""Compilers beside each other, and processes that they may let compile; other ranks have theirs."""
Result = TypeVar("Result")

_seen: set[Hashable] = set()

active = False
"""Whether forms are asked for and nothing is launched; of the process: kernels of other threads
would not run. :class:`.launcher.Form` reads it in every call."""


@contextmanager
def _asking() -> Iterator[None]:
    global active  # noqa: PLW0603 (what every launch reads is cheapest as a module's name)
    # An error is the second run's, which compiles that form again, to raise.
    with (
        Compilers(THREADS) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        active = True
        try:
            yield
        finally:
            active = False


def warmed_up(run: Callable[[], Result], alike: Hashable = None) -> Result:
    """Call what launches kernels: once to have their forms compiled, launching nothing, then so.

    While a process loads a model: in the first call results are not written.

    Args:
        run: launches through :mod:`.launcher`, and depends on no result. Forms that
            want another assembler compile in the second call.
        alike: what says which forms are wanted; of several such calls the first alone asks, and
            what it did not the others compile as they launch. None: each asks.

    Returns:
        What the second call returned.
    """
    if THREADS > 1 and not active and alike not in _seen and hasattr(triton, "AsyncCompileMode"):
        if alike is not None:
            _seen.add(alike)
        with _asking():
            run()
    return run()
