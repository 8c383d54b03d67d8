"""Which workers there are, how they are, and which one is next.

Invariant: ``outstanding`` of a worker is the number of requests it holds, given back in a
    ``finally`` whatever happened. The choice is the ready worker with the fewest outstanding
    requests; equals take turns. Probing is :mod:`taut_service.prober`'s work.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import StrEnum

from taut_service.settings import ModelSettings, Settings, WorkerSettings
from taut_service.upstream import UpstreamClient

logger = logging.getLogger(__name__)


class WorkerState(StrEnum):
    """What a worker is known to be; only ``READY`` gets requests."""

    STARTING = "starting"
    READY = "ready"
    WRONG_TOKEN = "wrong_token"  # noqa: S105 - a token of text
    UNREACHABLE = "unreachable"
    DRAINING = "draining"


class Worker:
    """One vLLM server as the gateway sees it.

    Args:
        settings: its name and address.
        client: connections to it.
        clock: wall time in seconds since the epoch, for ``since``.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        client: UpstreamClient,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = settings.name
        self.header = settings.name.encode()
        self.client = client
        self.state = WorkerState.STARTING
        self.detail = "not probed yet"
        self.was_ready = False
        self.outstanding = 0
        self.check_now = asyncio.Event()
        self._clock = clock
        self.since = clock()

    @property
    def ready(self) -> bool:
        """Whether it may be given a request."""
        return self.state is WorkerState.READY

    def become(self, state: WorkerState, detail: str = "") -> None:
        """Move to a state; ``since`` is when the state, not the detail, last changed."""
        self.detail = detail
        if state is self.state:
            return
        logger.info("worker %s: %s -> %s %s", self.name, self.state, state, detail)
        self.state = state
        self.since = self._clock()
        self.was_ready = self.was_ready or state is WorkerState.READY
        if state is not WorkerState.READY:
            self.client.close()

    def lose(self, detail: str) -> None:
        """Take it out of routing because a request could not reach it; have it probed at once."""
        if self.ready:
            self.become(WorkerState.UNREACHABLE, detail)
        self.check_now.set()

    @contextmanager
    def holding_request(self) -> Iterator[None]:
        """Count one request for as long as the block lasts."""
        self.outstanding += 1
        try:
            yield
        finally:
            self.outstanding -= 1


class WorkerPool:
    """The workers of each configured model.

    Args:
        workers: model name → its workers.
    """

    def __init__(self, workers: dict[str, list[Worker]]) -> None:
        self._workers = workers
        self._turn = 0

    def of(self, model: str) -> list[Worker]:
        """Return the workers of a configured model."""
        return self._workers[model]

    def all(self) -> Iterator[tuple[str, Worker]]:
        """Yield (model name, worker) in the order of the configuration."""
        for model, workers in self._workers.items():
            for worker in workers:
                yield model, worker

    def has_ready(self, model: str) -> bool:
        """Whether any worker of the model may be given a request."""
        return any(worker.ready for worker in self._workers[model])

    def choose(self, model: str, tried: Collection[Worker] = ()) -> Worker | None:
        """Return the ready worker with the fewest outstanding requests.

        Args:
            model: a configured model name.
            tried: workers that already failed this request.

        Returns:
            The worker, or None if no other is ready.
        """
        workers = self._workers[model]
        self._turn += 1
        best: Worker | None = None
        for i in range(len(workers)):
            worker = workers[(i + self._turn) % len(workers)]
            if not worker.ready or worker in tried:
                continue
            if best is None or worker.outstanding < best.outstanding:
                best = worker
        return best

    def close(self) -> None:
        """Close every idle connection."""
        for _, worker in self.all():
            worker.client.close()


def build_pool(settings: Settings, on_stale: Callable[[], None]) -> WorkerPool:
    """Make the pool that the configuration describes.

    Args:
        settings: the configuration.
        on_stale: told when a pooled connection turned out to be closed.

    Returns:
        The pool, every worker in state ``starting``.
    """

    def worker(entry: WorkerSettings) -> Worker:
        return Worker(
            entry, UpstreamClient(entry.host, entry.port, settings.timeouts, on_stale=on_stale)
        )

    def workers(model: ModelSettings) -> list[Worker]:
        return [worker(entry) for entry in model.workers]

    return WorkerPool({model.name: workers(model) for model in settings.models})
