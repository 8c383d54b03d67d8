"""What the guard may spend: a share of the CPU time that the gateway spends on its clients.

Two *token buckets* in seconds of CPU time. One fills as the rest of the process works, at
``guard.max_cpu_share`` of that, the other with time, at :data:`FLOOR` of a core, for a gateway with
little to do. What is spent leaves both, and either may allow it: so the larger of both is kept, not
their sum. A drawn answer that comes while both are empty is left out, so the sample thins itself,
and whether one is left out does not depend on what it says. What the steps of a comparison take is
timed; what it costs besides is learnt (:mod:`.cost`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from taut_service.guard.cost import CostModel

_Result = TypeVar("_Result")
FLOOR = 0.001
"""Of a core: an idle gateway may still compare an answer in two seconds."""
BURST_S = 0.01
"""CPU seconds that can be saved up: a few comparisons."""
WINDOW_S = 0.25
"""Of work from which the cost of comparisons is learnt. Short: a machine that becomes slower or
faster does so within all windows alike."""
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
        self._share, self._process_s, self._now = share, process_s, now
        self._earned = self._granted = BURST_S
        self._seen = now(), process_s(), 0.0
        self._model = CostModel()
        self._window = now(), process_s(), 0.0
        self._requests = self._events = 0
        self._steps_s = 0.0
        self.spent_s = 0.0
        """CPU time of all comparisons."""
        self.cost_s = 0.0
        """Of one comparison, lately."""
        self.kept = 1.0
        """Share of the drawn answers that could be afforded lately."""

    @property
    def factor(self) -> float:
        """What is charged for each second that the steps of comparisons take."""
        return self._model.factor

    def served(self, events: int) -> None:
        """Tell that a client's request has ended.

        Args:
            events: of its stream.
        """
        self._requests += 1
        self._events += events
        now = self._now()
        at, process_s, steps_s = self._window
        if now - at < WINDOW_S:
            return
        self._window = now, self._process_s(), self._steps_s
        work = self._requests, self._events, self._steps_s - steps_s
        self._requests = self._events = 0
        self._model.learn(work, self._window[1] - process_s)

    def stepped(self, seconds: float) -> float:
        """Count CPU time seen in a step of a comparison; return what is charged for it."""
        self._steps_s += seconds
        charged = seconds * self._model.factor
        self.spent_s += charged
        return charged

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
        earned = self._share * (self._seen[1] - process_s - spent)
        self._earned = min(BURST_S, self._earned + earned - spent)
        granted = self._granted + FLOOR * (self._seen[0] - at) - spent
        # Where much is earned this one would be in debt for hours.
        self._granted = max(-BURST_S, min(BURST_S, granted))
        allowed = max(self._earned, self._granted) > waiting * self.cost_s
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
                self.spent_s += self._budget.stepped(time.thread_time() - began)
            try:
                given = yield waits_for
                step = self._work.send
            except BaseException as error:
                step, given = self._work.throw, error
