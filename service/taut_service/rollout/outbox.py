"""Deliveries to somebody outside, in their order, beside everything else.

Nothing of a rollout waits for one. What nobody took after a few tries is dropped and counted; the
log says so once, and again when somebody takes the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)
TRIES, PAUSE_S, CLOSE_S = 3, 1.0, 5.0
WAITING = 1000

Item = TypeVar("Item")


class DeliveryError(Exception):
    """Nobody took it; ``str()`` says why, without what may be secret."""


class Outbox(Generic[Item]):
    """Belongs to one event loop.

    Args:
        name: of the receiver, for logs.
        deliver: hands one over; raises DeliveryError.
    """

    def __init__(self, name: str, deliver: Callable[[Item], Awaitable[None]]) -> None:
        self._name = name
        self._deliver = deliver
        self._waiting: asyncio.Queue[Item] = asyncio.Queue(WAITING)
        self._task: asyncio.Task[None] | None = None
        self._lost = False
        self.failures = 0
        """Items that nobody took."""

    def start(self) -> None:
        """Begin to deliver."""
        self._task = asyncio.get_running_loop().create_task(self._deliver_all())
        self._task.add_done_callback(self._ended)

    def put(self, item: Item) -> None:
        """Deliver it, soon; before the start nothing is."""
        if self._task is None:
            return
        try:
            self._waiting.put_nowait(item)
        except asyncio.QueueFull:
            self._failed(f"{WAITING} wait already")

    async def close(self) -> None:
        """Give what waits a last chance, then stop."""
        if self._task is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._waiting.join()
        except TimeoutError:
            logger.warning("rollout: %s was not told everything", self._name)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _deliver_all(self) -> None:
        while True:
            item = await self._waiting.get()
            try:
                await self._try_to_deliver(item)
            finally:
                self._waiting.task_done()

    async def _try_to_deliver(self, item: Item) -> None:
        for number in range(TRIES):
            try:
                await self._deliver(item)
            except DeliveryError as error:
                reason = str(error)
            else:
                if self._lost:
                    logger.info("rollout: %s is told again", self._name)
                self._lost = False
                return
            if number < TRIES - 1:
                await asyncio.sleep(PAUSE_S * 2**number)
        self._failed(reason)

    def _failed(self, reason: str) -> None:
        self.failures += 1
        if not self._lost:
            logger.error("rollout: %s is not told of changes: %s", self._name, reason)
        self._lost = True

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            text = "rollout: %s is told nothing any more"
            logger.critical(text, self._name, exc_info=task.exception())
