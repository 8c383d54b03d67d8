"""One vLLM server as the gateway sees it: its state, what it holds, whether it may get more.

Invariant: ``outstanding`` and ``outstanding_tokens`` count what :meth:`Worker.take` took and
    :meth:`Worker.give_back` gave back. The state is :mod:`taut_service.worker.prober`'s to set;
    ``draining`` is the operator's; the breaker is moved by the outcomes of requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from enum import StrEnum

from taut_service.config.settings import Breaker, Golden, WorkerSettings
from taut_service.route.breaker import CircuitBreaker
from taut_service.route.rendezvous import seed_of
from taut_service.worker.upstream import UpstreamClient
from taut_service.worker.worker_load import ReportedLoad

logger = logging.getLogger(__name__)

FIRST_BACK_OFF_S = 0.1
"""For how long a worker is avoided after one answer "too busy"; doubled for each further one."""
MAX_BACK_OFF_S = 2.0
SMOOTHING = 0.05
"""Weight of the newest request in the mean size of a request."""
TYPICAL_TOKENS = 512.0
"""Size assumed of a request until one was seen."""


class WorkerState(StrEnum):
    """What a worker is known to be; only ``READY`` gets requests."""

    STARTING = "starting"
    READY = "ready"
    WRONG_TOKEN = "wrong_token"  # noqa: S105 - a token of text
    UNREACHABLE = "unreachable"
    DRAINING = "draining"


class Worker:
    """One vLLM server. Outlives a reload of the configuration if that keeps its identity.

    Args:
        settings: its name and address.
        served_name: what it calls the model.
        golden: how it proves itself.
        client: connections to it.
        breaker: when to leave it alone.
        clock: wall time in seconds since the epoch, for ``since``.
        monotonic: seconds, for everything else.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        served_name: str,
        golden: Golden | None,
        client: UpstreamClient,
        breaker: Breaker,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.served_name = served_name
        self.golden = golden
        self.name = settings.name
        self.header = settings.name.encode()
        self.seed = seed_of(self.header)
        self.client = client
        self.breaker = CircuitBreaker(breaker, monotonic)
        self.state = WorkerState.STARTING
        self.detail = "not probed yet"
        self.was_ready = False
        self.probed = False
        self.draining = False
        self.outstanding = 0
        self.outstanding_tokens = 0
        self.mean_tokens = TYPICAL_TOKENS
        self.reported: ReportedLoad | None = None
        self.stale_after_s = 0.0
        self.check_now = asyncio.Event()
        self._busy_until = 0.0
        self.back_off_s = 0.0
        self._clock = clock
        self._monotonic = monotonic
        self.since = clock()

    @property
    def ready(self) -> bool:
        """Whether it works and is not being drained."""
        return self.state is WorkerState.READY and not self.draining

    @property
    def busy(self) -> bool:
        """Whether it said a moment ago that it has too much to do: others are preferred."""
        return self.back_off_s > 0 and self._monotonic() < self._busy_until

    def load(self) -> float:
        """Return its load in tokens, for comparison with other workers of the same variant.

        What this gateway has given it, and what it reports to have from elsewhere, counted as
        requests of mean size; a full KV cache doubles it. A report older than ``stale_after_s``
        is ignored.
        """
        tokens = float(self.outstanding_tokens)
        reported = self.reported
        if reported is None or self._monotonic() - reported.at > self.stale_after_s:
            return tokens
        return (tokens + reported.foreign * self.mean_tokens) * (1.0 + reported.kv_usage)

    def take(self, tokens: int) -> bool:
        """Count a request in.

        Args:
            tokens: prompt and completion, as estimated.

        Returns:
            Whether it is the probe of a half-open breaker.
        """
        self.outstanding += 1
        self.outstanding_tokens += tokens
        return not self.breaker.closed and self.breaker.begin()

    def give_back(self, tokens: int) -> None:
        """Count the request out, with the same number of tokens."""
        self.outstanding -= 1
        self.outstanding_tokens -= tokens
        self.mean_tokens += SMOOTHING * (tokens - self.mean_tokens)

    def back_off(self) -> None:
        """Prefer others for a while: it answered that it has too much to do."""
        self.back_off_s = min(MAX_BACK_OFF_S, 2 * self.back_off_s or FIRST_BACK_OFF_S)
        self._busy_until = self._monotonic() + self.back_off_s

    def answered(self, probe: bool) -> None:
        """Count a whole answer."""
        self.back_off_s = 0.0
        self.breaker.succeeded(probe)

    def become(self, state: WorkerState, detail: str = "") -> None:
        """Move to a state; ``since`` is when the state, not the detail, last changed."""
        self.probed = True
        self.detail = detail
        if state is self.state:
            return
        logger.info("worker %s: %s -> %s %s", self.name, self.state, state, detail)
        self.state = state
        self.since = self._clock()
        self.was_ready = self.was_ready or state is WorkerState.READY
        if state is WorkerState.READY:
            self.breaker.reset()
        else:
            self.client.close()

    def lose(self, detail: str) -> None:
        """Take it out of routing because a request could not reach it; have it probed at once."""
        if self.state is WorkerState.READY:
            self.become(WorkerState.UNREACHABLE, detail)
        self.check_now.set()

    def drain(self) -> None:
        """Give it no more requests; what it holds may finish."""
        self.draining = True

    def undrain(self) -> None:
        """Give it requests again, if it works."""
        self.draining = False
