"""How long tests wait: for hours of a machine that stands still, not for what hangs.

What counts is time in which this process could run. A machine that stands still for seconds moves
every clock, so a turn counts as what this process computed in it, or as STILL_S at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

HANGS_S = 30.0
"""After these something hangs; no statement of how fast it is."""
STILL_S = 0.02
_TURN_S = 0.005
T = TypeVar("T")


class RunningTime:
    """Counts, turn by turn, the seconds in which this process could run."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began, self._computed = time.monotonic(), time.process_time()

    def turn(self) -> None:
        """Count what has passed since the turn before."""
        now, computed = time.monotonic(), time.process_time()
        self.seconds += min(now - self._began, max(computed - self._computed, STILL_S))
        self._began, self._computed = now, computed


async def eventually(
    condition: Callable[[], Any], timeout_s: float = HANGS_S, pause_s: float = _TURN_S
) -> float:
    """Wait until a plain or async condition holds; return the seconds that took, as counted.

    Raises:
        TimeoutError: ``timeout_s`` seconds so counted have passed.
    """
    running = RunningTime()
    async with asyncio.timeout(timeout_s + HANGS_S):
        while running.seconds < timeout_s:
            result = condition()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return running.seconds
            await asyncio.sleep(pause_s)
            running.turn()
    raise TimeoutError(f"not within {timeout_s} s")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Return what something gives that takes no longer, as counted; end it if it does.

    Raises:
        TimeoutError: ``seconds`` so counted have passed.
    """
    return (await timed(work, seconds))[0]


async def timed(work: Awaitable[T], limit_s: float = HANGS_S) -> tuple[T, float]:
    """Return what something gives, and the seconds that took, as counted.

    Raises:
        TimeoutError: ``limit_s`` seconds so counted have passed.
    """
    running, task = RunningTime(), asyncio.ensure_future(work)
    try:
        while running.seconds < limit_s:
            await asyncio.wait({task}, timeout=_TURN_S)
            running.turn()
            if task.done() and running.seconds < limit_s:
                return task.result(), running.seconds
    finally:
        task.cancel()
    raise TimeoutError(f"not within {limit_s} s")
