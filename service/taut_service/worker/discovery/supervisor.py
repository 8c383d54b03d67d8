"""Runs one watch for every variant whose workers are discovered, over reloads.

Invariant: at any time there is exactly one running watch for each such variant of the
configuration in force. A watch whose ``discover`` did not change goes on over a reload.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from taut_service.config.settings import Discovery, Settings, WorkerSettings
from taut_service.worker.discovery.choose import watch_for
from taut_service.worker.discovery.watch import DiscoveryState, Watch

logger = logging.getLogger(__name__)

Discovered = Callable[[str, str, Sequence[WorkerSettings]], bool]
"""(model, variant, all its workers now) → whether that variant still wants them."""


@dataclass(frozen=True, slots=True)
class _Running:
    discover: Discovery
    watch: Watch
    task: asyncio.Task[None]


class Supervisor:
    """Belongs to one event loop.

    Args:
        discovered: told of every new set.
    """

    def __init__(self, discovered: Discovered) -> None:
        self._discovered = discovered
        self._running: dict[tuple[str, str], _Running] = {}

    def follow(self, settings: Settings) -> None:
        """Start and stop watches so that they fit a configuration.

        Args:
            settings: in force from now on.
        """
        wanted = {
            (model.name, variant.name): variant.discover
            for model in settings.models
            for variant in model.every_variant()
            if variant.discover is not None
        }
        for key, running in list(self._running.items()):
            if wanted.get(key) != running.discover:
                running.task.cancel()
                del self._running[key]
        for key, discover in wanted.items():
            if key not in self._running:
                self._running[key] = self._start(key, discover)

    def _start(self, key: tuple[str, str], discover: Discovery) -> _Running:
        model, variant = key

        def apply(workers: tuple[WorkerSettings, ...]) -> None:
            if not self._discovered(model, variant, workers):
                logger.warning("discovery of %s/%s: no longer configured", model, variant)

        watch = watch_for(discover, apply)
        task = asyncio.get_running_loop().create_task(watch.run())
        task.add_done_callback(_report)
        return _Running(discover, watch, task)

    def states(self) -> Iterator[tuple[str, str, DiscoveryState]]:
        """Yield (model, variant, state) of every watch."""
        for (model, variant), running in self._running.items():
            yield model, variant, running.watch.state

    async def close(self) -> None:
        """Stop every watch."""
        tasks = [running.task for running in self._running.values()]
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _report(task: asyncio.Task[None]) -> None:
    # A defect of ours: the last known workers stay, and the log says why they no longer change.
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a discovery ended", exc_info=error)
