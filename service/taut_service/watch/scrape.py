"""Turns the metrics into Prometheus text without stopping the event loop.

Ten thousand series take some 60 ms of Python. They are written in a thread; while it runs, the
interpreter is asked to switch between threads after 1 ms instead of 5, which bounds how long a
request waits for its turn. Scrapes that arrive together share one text.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from taut_service.watch.gauges import Gauges

SWITCH_INTERVAL_S = 0.001


class Scrape:
    """Belongs to one event loop.

    Args:
        registry: what to write.
        gauges: read on the loop before the thread begins.
    """

    def __init__(self, registry: CollectorRegistry, gauges: Gauges) -> None:
        self._registry = registry
        self._gauges = gauges
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scrape")
        self._running: asyncio.Task[bytes] | None = None

    async def text(self) -> bytes:
        """Return the text format, version 0.0.4."""
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._write())
            self._running.add_done_callback(self._done)
        # A scraper that goes away must not end the scrape for another one.
        return await asyncio.shield(self._running)

    async def _write(self) -> bytes:
        self._gauges.read()
        loop = asyncio.get_running_loop()
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, SWITCH_INTERVAL_S))
        try:
            return await loop.run_in_executor(self._thread, generate_latest, self._registry)
        finally:
            sys.setswitchinterval(before)

    def _done(self, _: asyncio.Task[bytes]) -> None:
        self._running = None
