"""What every kind of discovery has in common: a state to look at and a set to hand over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from taut_service.config.settings import WorkerSettings

logger = logging.getLogger(__name__)

Apply = Callable[[tuple[WorkerSettings, ...]], None]
"""Takes the whole new set; must keep workers that stay and let streams on the others finish."""


class Watch(Protocol):
    """Follows one source of workers."""

    state: DiscoveryState

    async def run(self) -> None:
        """Follow it for ever; ends by cancellation."""


class DiscoveryState:
    """What a watch knows now, for metrics and the admin API; hands a changed set over.

    Args:
        source: short text naming the source, for logs.
        apply: who is told.
    """

    def __init__(self, source: str, apply: Apply) -> None:
        self.source = source
        self._apply = apply
        self.workers: tuple[WorkerSettings, ...] = ()
        self.failures = 0
        self.changes = 0
        self.detail = "not asked yet"
        self.last_success = 0.0

    @property
    def asked(self) -> bool:
        """Whether an answer or a failure has come back yet."""
        return self.last_success > 0 or self.failures > 0

    def found(self, workers: Iterable[WorkerSettings]) -> None:
        """Take what a successful look-up gave; the order does not matter."""
        self.last_success = time.time()
        if self.detail:
            logger.info("discovery %s: works", self.source)
            self.detail = ""
        ordered = tuple(sorted(set(workers), key=lambda worker: worker.name))
        if ordered == self.workers:
            return
        before, self.workers = set(self.workers), ordered
        self.changes += 1
        logger.info(
            "discovery %s: %d worker(s), new %s, gone %s",
            self.source,
            len(ordered),
            sorted(worker.name for worker in set(ordered) - before),
            sorted(worker.name for worker in before - set(ordered)),
        )
        self._apply(ordered)

    def failed(self, detail: str) -> None:
        """Keep the last known set; say why once, not at every attempt."""
        self.failures += 1
        if detail != self.detail:
            self.detail = detail
            logger.warning(
                "discovery %s: %s; keeping %d worker(s)", self.source, detail, len(self.workers)
            )


def worker_at(address: str, port: int) -> WorkerSettings:
    """Return the worker at an address, named by it.

    Args:
        address: IPv4 or IPv6 literal, or a host name.
        port: TCP port.
    """
    literal = f"[{address}]" if ":" in address else address
    return WorkerSettings(name=f"{literal}:{port}", url=f"http://{literal}:{port}")
