"""Asks a worker for its load now and then, beside the requests. One task per worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from taut_service.worker.upstream_errors import UpstreamError
from taut_service.worker.worker import Worker
from taut_service.worker.worker_load import parse_load

PAUSE_S = 1.0
"""Between two looks at whether scraping is wanted at all."""
TIMEOUT_S = 2.0
UNSUPPORTED_PAUSE_S = 30.0
"""Between two scrapes of a server that is not vLLM."""


class LoadWatch:
    """Keeps ``worker.reported`` fresh. Where it cannot, the last report grows stale and is ignored.

    Args:
        worker: to be asked.
        every_s: pause between two scrapes, seconds; None is not at all. Asked each time, since a
            reload may change it.
    """

    def __init__(self, worker: Worker, every_s: Callable[[], float | None]) -> None:
        self._worker = worker
        self._every_s = every_s

    async def run(self) -> None:
        """Scrape for ever; ends by cancellation."""
        while True:
            every_s = self._every_s()
            if every_s is None or not self._worker.ready:
                await asyncio.sleep(PAUSE_S if every_s is None else min(every_s, PAUSE_S))
                continue
            supported = await self.scrape()
            await asyncio.sleep(every_s if supported else max(every_s, UNSUPPORTED_PAUSE_S))

    async def scrape(self) -> bool:
        """Ask once.

        Returns:
            False if the worker answered and has no such figures.
        """
        worker = self._worker
        try:
            status, text = await worker.client.ask("GET", "/metrics", b"", TIMEOUT_S)
        except (UpstreamError, TimeoutError):
            # The prober's and the breaker's business; here the last report just grows old.
            return True
        load = parse_load(text, worker.outstanding, time.monotonic()) if status == 200 else None
        worker.reported = load
        return load is not None
