"""Memory that was freed, given back to the system."""

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """Glibc's ``malloc_trim``; other C libraries lack it."""
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


def return_freed_memory() -> None:
    """Give the pages that freed tensors left inside the heap back to the system.

    glibc raises the size from where it maps memory apart with every large block that is freed, up
    to 32 MB. Layers then lie in the heap, and what the next ones leave free between them adds up:
    10 MB for each block of 14 MB (26 blocks, 2026-11-27).
    """
    trim = _trim()
    if trim is not None:
        trim(0)
