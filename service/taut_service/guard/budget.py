"""What the guard may spend: a share of the CPU time that the gateway spends on its clients.

A *token bucket* in seconds of CPU time. It fills as the rest of the process works, at
``guard.max_cpu_share`` of that, and by :data:`FLOOR` of a core besides, for a gateway with little
to do. A drawn answer that comes while it is empty is left out, so the sample thins itself, and
whether one is left out does not depend on what it says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

_Result = TypeVar("_Result")
FLOOR = 0.001
"""Of a core: an idle gateway may still compare an answer in two seconds."""
BURST_S = 0.01
"""CPU seconds that can be saved up: a few comparisons."""
UNSEEN = 0.6
"""What the steps of a comparison do not see of its time, as a share of what they do: the loop
reads workers' answers from their sockets in callbacks of its own. It grows with how busy the
machine is, as clients find their caches cold: measured 0.2 to 0.6 (docs/findings/guard-cost.md)."""
_LATELY = 0.02
"""Weight of the newest answer in means: about the last hundred count."""


class CpuBudget:
    """Belongs to one event loop.

    Args:
        share: of the other CPU time of the process; None for no bound.
        process_s: CPU time of the process, in seconds.
        now: seconds, never going back.
    """

    def __init__(
        self,
        share: float | None,
        process_s: Callable[[], float] = time.process_time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._share = share
        self._process_s = process_s
        self._now = now
        self._credit = BURST_S
        self._seen = now(), process_s(), 0.0
        self.spent_s = 0.0
        """CPU time of all comparisons."""
        self.cost_s = 0.0
        """Of one comparison, lately."""
        self.kept = 1.0
        """Share of the drawn answers that could be afforded lately."""

    def allows(self, waiting: int = 0) -> bool:
        """Whether one more answer can be afforded; ask once for each that is drawn.

        Args:
            waiting: answers that were allowed and are not yet compared.
        """
        if self._share is None:
            return True
        at, process_s, spent_s = self._seen
        self._seen = self._now(), self._process_s(), self.spent_s
        spent = self.spent_s - spent_s
        # Sums of differences, not the larger of them: work comes in bursts, and would count twice.
        others = self._seen[1] - process_s - spent
        earned = self._share * others + FLOOR * (self._seen[0] - at)
        self._credit = min(BURST_S, self._credit + earned - spent)
        allowed = self._credit > waiting * self.cost_s
        self.kept += _LATELY * (allowed - self.kept)
        return allowed

    async def charge(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Do some work of the guard's and count its CPU time."""
        charged = _Charged(work, self)
        try:
            result: _Result = await charged
        finally:
            self.cost_s += _LATELY * (charged.spent_s - self.cost_s)
        return result


class _Charged:
    """Awaits a coroutine step by step, with the thread's clock before and after each.

    Args:
        work: to be awaited.
        budget: is told what a step took.
    """

    def __init__(self, work: Coroutine[Any, Any, Any], budget: CpuBudget) -> None:
        self._work = work
        self._budget = budget
        self.spent_s = 0.0

    def __await__(self) -> Generator[Any, Any, Any]:
        step, given = self._work.send, None
        while True:
            began = time.thread_time()
            try:
                waits_for = step(given)
            except StopIteration as end:
                return end.value
            finally:
                spent = (time.thread_time() - began) * (1 + UNSEEN)
                self.spent_s += spent
                self._budget.spent_s += spent
            try:
                given = yield waits_for
                step = self._work.send
            except BaseException as error:
                step, given = self._work.throw, error
