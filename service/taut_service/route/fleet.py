"""All workers that the gateway watches, over every reload of the configuration.

A worker is known by its name, its address, the model name it serves and its golden prompt. While
those stay it is the same object: its state, its connections and what it holds outlive a reload.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from taut_service.config.settings import Golden, Settings, WorkerSettings
from taut_service.config.worker_keys import WorkerKeys
from taut_service.worker.load_watch import LoadWatch
from taut_service.worker.prober import Prober, ProbeTimes
from taut_service.worker.upstream import UpstreamClient
from taut_service.worker.worker import Worker

logger = logging.getLogger(__name__)
_Identity = tuple[WorkerSettings, str, Golden | None]


class Fleet:
    """Makes workers, has them probed, lets them go. Belongs to one event loop.

    Args:
        times: how often workers are probed.
        on_stale: told when a pooled connection turned out to be closed.
    """

    def __init__(self, times: ProbeTimes, on_stale: Callable[[], None]) -> None:
        self._times = times
        self._on_stale = on_stale
        self._workers: dict[_Identity, Worker] = {}
        self._serving: Counter[str] = Counter()  # workers of each served name
        self._tasks: dict[Worker, list[asyncio.Task[None]]] = {}
        self._load_every_s: float | None = None
        self._running = False
        self.keys: WorkerKeys = {}
        """What workers want as a key; put in force by :meth:`employ`."""

    def __iter__(self) -> Iterator[Worker]:
        """Iterate over the workers that are watched."""
        return iter(self._workers.values())

    def employ(
        self, entry: WorkerSettings, served_name: str, golden: Golden | None, settings: Settings
    ) -> Worker:
        """Return the worker of that identity, new or kept.

        Args:
            entry: name and address.
            served_name: what it calls the model.
            golden: how it proves itself.
            settings: the configuration in force from now on.

        Returns:
            The worker; probed from now on, or from :meth:`start` on.
        """
        identity = (entry, served_name, golden)
        routing = settings.routing
        worker = self._workers.get(identity)
        if worker is None:
            client = UpstreamClient(entry.host, entry.port, settings.timeouts, self._on_stale)
            worker = Worker(entry, served_name, golden, client, routing.breaker)
            self._workers[identity] = worker
            self._serving[served_name] += 1
        worker.client.configure(settings.timeouts)
        worker.client.use_key(None if entry.api_key_file is None else self.keys[entry.api_key_file])
        worker.breaker.limits = routing.breaker
        worker.stale_after_s = routing.load.stale_after_s
        self._load_every_s = routing.load.every_s
        if self._running and worker not in self._tasks:
            self._watch(worker)
        return worker

    def keep_only(self, workers: Collection[Worker]) -> None:
        """Let all others go: no new request, no probe; what they hold may finish."""
        for identity, worker in list(self._workers.items()):
            if worker not in workers:
                del self._workers[identity]
                self._serving[worker.served_name] -= 1
                for task in self._tasks.pop(worker, ()):
                    task.cancel()
                worker.client.retire()

    def start(self) -> None:
        """Begin to probe."""
        self._running = True
        for worker in self:
            self._watch(worker)

    async def close(self) -> None:
        """Stop probing and close every idle connection."""
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        self.keep_only(())
        await asyncio.gather(*tasks, return_exceptions=True)

    def _watch(self, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        self._tasks[worker] = [
            loop.create_task(Prober(worker, self._times).run()),
            loop.create_task(LoadWatch(worker, lambda: self._every_s(worker)).run()),
        ]
        for task in self._tasks[worker]:
            task.add_done_callback(_report)

    def _every_s(self, worker: Worker) -> float | None:
        """Pause between looks at a worker's load; None where no other is there to compare with."""
        return self._load_every_s if self._serving[worker.served_name] > 1 else None


def _report(task: asyncio.Task[None]) -> None:
    # A defect of ours: the worker is out of routing (see Prober.run), and the log says why.
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a prober ended", exc_info=error)
