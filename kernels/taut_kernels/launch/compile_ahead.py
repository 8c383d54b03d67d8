"""Compiling side by side what will be launched one after the other.

Triton compiles a form of a kernel where it is first launched. A loaded model has dozens of forms,
each about a second of one core: asked for ahead they take half the time or less, and asked for
before weights are read some of that time passes meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, TypeVar

import triton

from taut_kernels.launch.compile_processes import Compilers

THREADS = min(16, len(os.sched_getaffinity(0)))
"""Compilers beside each other, and processes that they may let compile; other ranks have theirs."""
Result = TypeVar("Result")

_seen: set[Hashable] = set()
_asked: list[Any] = []

active = False
"""Whether forms are asked for and nothing is launched; of the process: kernels of other threads
would not run. :class:`.launcher.Form` reads it in every call."""


@cache
def _mode() -> Any:
    """Return what Triton hands its forms to: one for the process, so that each is asked for once.

    An error is the launch's, which compiles that form again, to raise.
    """

    class Mode(triton.AsyncCompileMode):  # type: ignore[misc]
        def __exit__(self, *error: Any) -> None:
            self.raw_futures: list[Any] = []  # Triton's own waits for them
            super().__exit__(*error)

    return Mode(Compilers(THREADS), ignore_errors=True)


def note(form: Any) -> None:
    """Keep what Triton answered to a form that was asked for: it is compiled, or will be."""
    if hasattr(form, "result"):
        _asked.append(form)


def _ask(run: Callable[[], object]) -> list[Any]:
    """Call what launches kernels, launching nothing; return the forms that are not compiled yet."""
    global active  # noqa: PLW0603 (what every launch reads is cheapest as a module's name)
    with _mode():
        active = True
        try:
            run()
            return [*_asked]
        finally:
            active = False
            _asked.clear()


def _is_first(alike: Hashable) -> bool:
    """Say whether asking can bring something, and nobody has asked for what is alike."""
    if THREADS == 1 or active or alike in _seen or not hasattr(triton, "AsyncCompileMode"):
        return False
    if alike is not None:
        _seen.add(alike)
    return True


def ask(run: Callable[[], object], alike: Hashable) -> None:
    """Have forms compiled that will be wanted, while this thread goes on.

    Args:
        run: launches through :mod:`.launcher`; what its tensors hold is not read.
        alike: as of :func:`warmed_up`; of several such calls the first alone asks.
    """
    if _is_first(("ahead", alike)):
        _ask(run)


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
    if _is_first(alike):
        for form in _ask(run):
            form.result(ignore_errors=True)
    return run()
