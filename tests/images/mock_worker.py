"""The mock engine of the gateway's tests in a thread, for gateways in containers."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "service"))

from mock_engine import Faults, MockEngine


@contextmanager
def mock_worker(faults: Faults) -> Iterator[MockEngine]:
    """A worker on a free loopback port; tests may change ``faults`` while it runs."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    engine = MockEngine(faults)
    try:
        asyncio.run_coroutine_threadsafe(engine.start(), loop).result(30)
        yield engine
    finally:
        asyncio.run_coroutine_threadsafe(engine.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
