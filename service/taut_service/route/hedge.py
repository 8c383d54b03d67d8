"""A second copy of a request that takes long: whichever worker answers first wins.

Only for answers that come in one piece: of a stream the first token decides nothing.
Source: J. Dean and L. A. Barroso, "The tail at scale", CACM 2013.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from taut_service.errors import GatewayError
from taut_service.route.attempt import Attempt

Opening = tuple[Attempt, Coroutine[None, None, str]]


async def open_hedged(
    first: Opening, second: Callable[[], Opening | None], after_s: float
) -> tuple[Attempt, str]:
    """Open one attempt, and another one if that takes long.

    Args:
        first: an attempt and its ``open``.
        second: makes the other one; None if there is no worker or no budget for it.
        after_s: patience with the first.

    Returns:
        The attempt to go on with and the outcome of its ``open``; the other one is ended.

    Raises:
        GatewayError: both failed for good.
    """
    attempts: dict[asyncio.Future[str], Attempt] = {asyncio.ensure_future(first[1]): first[0]}
    try:
        done, _ = await asyncio.wait(attempts, timeout=after_s)
        if not done and (other := second()) is not None:
            attempts[asyncio.ensure_future(other[1])] = other[0]
        winner = await _first_good(set(attempts))
    except BaseException:
        _abandon(attempts)
        raise
    attempt = attempts.pop(winner)
    _abandon(attempts)
    return attempt, winner.result()


async def _first_good(pending: set[asyncio.Future[str]]) -> asyncio.Future[str]:
    """Return the first that has an answer to relay, or the last to fail."""
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.exception() is None and not task.result():
                return task
        if not pending:
            return task


def _abandon(attempts: dict[asyncio.Future[str], Attempt]) -> None:
    for task, attempt in attempts.items():
        # A task that is cancelled while it waits for its worker closes the connection itself.
        task.cancel()
        task.add_done_callback(_look_at)
        attempt.end()


def _look_at(task: asyncio.Future[str]) -> None:
    """Take the outcome of a loser, so that asyncio does not report it as unseen."""
    if not task.cancelled():
        error = task.exception()
        if error is not None and not isinstance(error, GatewayError):
            raise error
