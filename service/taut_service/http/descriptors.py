"""Keeps file descriptors free for what serves requests, by closing idle clients.

A client that connects and says nothing costs a descriptor. When they are used up, the kernel hands
over no connection, and none to a worker can be opened: nobody is served, and nothing says why. So
a part of the limit is kept: a client's connection that would take of it costs the idlest clients
theirs. The number of a new descriptor tells how many are in use, since the system gives the lowest
free one (POSIX.1-2017, ``open``).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import resource
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

logger = logging.getLogger("taut_service")

LEAST_KEPT = 32
MOST_KEPT = 1024
LOG_PAUSE_S = 60.0
"""Between two lines that say the same."""
_KEEP = 7 / 8
"""Part of their share that clients hold after a look, so that a flood of them brings few looks.

A closed connection gives its descriptor back a turn of the loop later; until then more arrive.
"""


class Closable(Protocol):
    """A client's connection; ``number`` counts them up, as the clock of a loop may stand still."""

    number: int

    @property
    def idle_since(self) -> float | None:
        """When its last request ended, or it began; None while one is under way."""

    def drop(self) -> None:
        """Close it at once."""


_Connection = TypeVar("_Connection", bound=Closable)


def raise_soft_limit() -> int:
    """Allow this process as many descriptors as it may allow itself, and say so.

    Returns:
        The limit in force.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError) as error:
            logger.warning(
                "file descriptors: limit stays %d (hard limit %d): %s", soft, hard, error
            )
            return soft
        logger.info("file descriptors: limit raised from %d to %d", soft, hard)
    else:
        logger.info("file descriptors: limit %d", soft)
    return hard


def current_limit() -> int:
    """Return how many descriptors this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _lowest_free() -> int:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


def number_of(transport: asyncio.Transport) -> int:
    """Return the descriptor of a connection."""
    number: int = transport.get_extra_info("socket").fileno()
    return number


class DescriptorReserve:
    """The part of the limit that clients do not get.

    Args:
        limit: descriptors that the process may have.
        clock: seconds, monotonic; given by tests.
    """

    def __init__(
        self,
        limit: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._clock = clock
        # Of a very low limit no more than half of what is left is kept.
        used = _lowest_free()
        self._from = limit - min(MOST_KEPT, max(LEAST_KEPT, limit // 4), (limit - used) // 2)
        self._share = self._from - used
        self._said_at = float("-inf")
        self._unsaid = 0

    def is_touched_by(self, descriptor: int, connections: int) -> bool:
        """Whether a client takes of what is kept.

        Args:
            descriptor: of its connection. One from a gap that others left says nothing.
            connections: of clients, this one among them.
        """
        return descriptor >= self._from or connections > self._share

    def make_room(self, newcomer: _Connection, connections: Sequence[_Connection]) -> None:
        """Close the idlest clients, or the newcomer where every other has a request under way.

        Args:
            newcomer: has taken one of the descriptors kept.
            connections: of clients, those not counted that are being closed already.
        """
        since = [
            (idle_since, connection.number, connection)
            for connection in connections
            if connection is not newcomer and (idle_since := connection.idle_since) is not None
        ]
        count = max(1, len(connections) - int(self._share * _KEEP))
        chosen = [connection for _, _, connection in heapq.nsmallest(count, since)] or [newcomer]
        for connection in chosen:
            connection.drop()
        self._say(len(chosen))

    def _say(self, closed: int) -> None:
        self._unsaid += closed
        now = self._clock()
        if now - self._said_at < LOG_PAUSE_S:
            return
        logger.warning(
            "file descriptors: %d of %d are in use; closed %d client connections, the idlest first"
            " (raise the limit of open files, or have a proxy in front hold idle clients)",
            self._from,
            self._limit,
            self._unsaid,
        )
        self._said_at, self._unsaid = now, 0
