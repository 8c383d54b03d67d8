"""A choice between two products on this CPU, measured once and kept.

Kept beside what Inductor keeps: a compiled graph calls the product that was chosen when it was
saved, so a start that loads the graph must choose the same.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir

from taut_kernels.launch.atomic_write import write_whole

COPIES = 8
"""Weights in turn, so many that none stays in a core's own cache."""
_ROUNDS = 12
"""The least time counts."""


def kept(name: str, known: Sequence[str], measure: Callable[[], str | None]) -> str | None:
    """Return a reason that was kept, None where it was kept that there is none; else measure.

    Args:
        name: of the choice, within the cache.
        known: what it depends on besides the CPU.
        measure: makes the choice.
    """
    place = Path(cache_dir()) / "taut" / f"{name}-{_key(known)}.txt"
    try:
        return place.read_text(encoding="utf-8") or None
    except FileNotFoundError:
        pass
    reason = measure()
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, reason or "")
    return reason


def _key(known: Sequence[str]) -> str:
    of_cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    stable = [line for line in of_cpu.splitlines() if not line.startswith(("cpu MHz", "processor"))]
    return hashlib.sha256("\n".join((*stable, *known)).encode()).hexdigest()[:20]


def least_times(*ways: Sequence[Callable[[], object]]) -> tuple[float, ...]:
    """Return the least CPU time of this thread for each way's calls, seconds; ways take turns.

    Args:
        ways: the calls of one way each.
    """
    least = [float("inf")] * len(ways)
    for _ in range(_ROUNDS):
        for i, calls in enumerate(ways):
            start = time.thread_time()
            for call in calls:
                call()
            least[i] = min(least[i], time.thread_time() - start)
    return tuple(least)
