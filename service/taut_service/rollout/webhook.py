"""Tells somebody of every change: the line of the log, as a JSON POST."""

from __future__ import annotations

import asyncio
import logging
import urllib.error
import urllib.request

logger = logging.getLogger(__name__)
TRIES, PAUSE_S, TIMEOUT_S = 3, 1.0, 5.0


class Webhook:
    """Posts lines in their order, beside everything else.

    Args:
        url: where to; None posts nothing.
    """

    def __init__(self, url: str | None) -> None:
        self._url = url
        self._waiting: asyncio.Queue[str] = asyncio.Queue(1000)
        self._task: asyncio.Task[None] | None = None
        self.failures = 0
        """Lines that nobody took."""

    def start(self) -> None:
        """Begin to post."""
        if self._url is not None:
            self._task = asyncio.get_running_loop().create_task(self._post_all(self._url))

    def tell(self, line: str) -> None:
        """Post a line, soon."""
        if self._task is not None:
            try:
                self._waiting.put_nowait(line)
            except asyncio.QueueFull:
                self.failures += 1

    async def close(self) -> None:
        """Give what waits a last chance, then stop."""
        if self._task is None:
            return
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._waiting.join()
        except TimeoutError:
            logger.warning("rollout: the webhook was not told everything")
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _post_all(self, url: str) -> None:
        while True:
            line = await self._waiting.get()
            try:
                await self._post(url, line)
            finally:
                self._waiting.task_done()

    async def _post(self, url: str, line: str) -> None:
        for number in range(TRIES):
            try:
                await asyncio.to_thread(_post_once, url, line.encode())
            except (OSError, ValueError) as error:
                # The address may hold a secret: only what went wrong is written down.
                reason = getattr(error, "reason", None) or getattr(error, "code", None) or error
                logger.warning("rollout: webhook, try %d of %d: %s", number + 1, TRIES, reason)
                await asyncio.sleep(PAUSE_S * 2**number)
            else:
                return
        self.failures += 1


def _post_once(url: str, body: bytes) -> None:
    request = urllib.request.Request(  # noqa: S310 - http or https: the settings see to it
        url, body, {"content-type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
        answer.read(1024)
