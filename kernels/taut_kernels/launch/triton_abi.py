"""What stands beneath Triton's launcher object, so that a launch need not go through it.

Every compiled kernel has a launcher: a Python object that allocates the scratch memory a kernel
asks for, puts what never changes between its caller's arguments, and calls one C function. Where no
scratch is asked for, what it passes on is fixed but for grid, stream and arguments. It is asked
once, with a recorder in the place of the C function, what it passes: versions of Triton order it
differently, and one that does what is not known here keeps its launcher.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

_SCRATCH = ("global_scratch_size", "profile_scratch_size")
"""Bytes a program that the launcher allocates at every launch; 0 where it does not."""
_NO_HOOKS = (None, None, None)
"""Metadata for profilers, and what they are told before and after a launch."""


class Route(NamedTuple):
    """How to launch a compiled kernel when no profiler listens.

    Attributes:
        call: takes the grid's three numbers, the stream, ``fixed`` and the kernel's arguments.
        fixed: what is the same in every launch.
        packed: the arguments are one tuple, not one each.
    """

    call: Callable[..., object]
    fixed: tuple[Any, ...]
    packed: bool

    def launch(self, grid: tuple[int, int, int], stream: int, arguments: tuple[Any, ...]) -> None:
        """Launch once; the launcher of this project does the same without this frame.

        Args:
            grid: programs along each axis.
            stream: as the driver numbers it.
            arguments: of the kernel, pointers as numbers.
        """
        if self.packed:
            self.call(*grid, stream, *self.fixed, arguments)
        else:
            self.call(*grid, stream, *self.fixed, *arguments)


def route(compiled: Any) -> Route:
    """Return the shortest way to launch a kernel that was launched before.

    Args:
        compiled: what Triton returned for it.
    """
    run, given = compiled.run, (compiled.function, compiled.packed_metadata, *_NO_HOOKS)
    return _beneath(run, given) or Route(run, given, packed=False)


def _beneath(run: Any, given: tuple[Any, ...]) -> Route | None:
    """Return the way around a launcher, None where it is not of a kind known here."""
    try:
        if any(getattr(run, size) for size in _SCRATCH):
            return None
        function, seen = run.launch, _passed_on(run, given)
    except (AttributeError, TypeError):
        return None
    if seen is None:
        return None
    fixed, packed = seen
    return Route(function, fixed, packed)


def _passed_on(run: Any, given: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool] | None:
    """Return what a launcher puts between stream and arguments, and whether it packs these.

    None where it passes something else than it was given, in another order or not at all.
    """
    calls: list[tuple[Any, ...]] = []
    observed = copy.copy(run)
    observed.launch = lambda *passed: calls.append(passed)
    # Numbers no launcher has of its own.
    leading, arguments = (2**40 + 1, 2**40 + 2, 2**40 + 3, 2**40 + 4), (2**40 + 5, 2**40 + 6)
    observed(*leading, *given, *arguments)
    if len(calls) != 1 or calls[0][: len(leading)] != leading:
        return None
    rest = calls[0][len(leading) :]
    if rest[-1:] == (arguments,):
        fixed, packed = rest[:-1], True
    elif rest[-len(arguments) :] == arguments:
        fixed, packed = rest[: -len(arguments)], False
    else:
        return None
    known = given[:2]
    return (fixed, packed) if all(value in fixed for value in known) else None
