"""How long a step has lasted, by two clocks: one that jumps promotes nothing.

Time counts while this process watches: the monotonic clock between two looks, and only if the wall
clock says the same. Where they differ the step's time begins anew, and so it does after a restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from taut_service.config.settings.rollout import LONGEST_PAUSE_S

TOLERANCE_S = 1.0
TOLERANCE_RATIO = 0.05
"""What the two may differ by between two looks: steering by NTP is slower than that."""
LONGEST_GAP_S = 2.0 * LONGEST_PAUSE_S
"""Between two looks; a process that was stopped for longer has not watched."""


class StepClock:
    """The clock of one model's step.

    Args:
        monotonic: seconds; given by tests.
        wall: seconds since the epoch; given by tests.
    """

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._step = -1
        self._last = (0.0, 0.0)
        self.watched_s = 0.0
        self.jumped_s = 0.0
        """By how much the clocks differed when they last did within this step."""

    def look(self, step: int) -> float:
        """Return the seconds for which a step was watched.

        Args:
            step: names it; another name begins at 0.
        """
        now = self._monotonic(), self._wall()
        passed, by_wall = now[0] - self._last[0], now[1] - self._last[1]
        self._last = now
        if step != self._step:
            self._step, self.watched_s, self.jumped_s = step, 0.0, 0.0
            return 0.0
        if passed > LONGEST_GAP_S:
            self.watched_s = 0.0
        elif abs(by_wall - passed) > TOLERANCE_S + TOLERANCE_RATIO * passed:
            self.watched_s, self.jumped_s = 0.0, by_wall - passed
        else:
            self.watched_s += passed
        return self.watched_s
