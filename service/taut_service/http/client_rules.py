"""What holds for every client's connection of one listener."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from taut_service.config.settings import Timeouts
from taut_service.expiry import Expiry
from taut_service.http.descriptors import DescriptorReserve

KEEP_ALIVE_S = 75.0
"""For the next request on a connection: longer than clients and balancers keep one (httpx 5 s,
aiohttp 15 s, nginx and AWS 60 s). Whoever ends it first meets no request on its way."""
SLOW_READER = "slow_reader"
DESCRIPTORS = "descriptors"
CLOSE_REASONS = (SLOW_READER, DESCRIPTORS)
"""Why the gateway closes a connection of a client that did nothing wrong; metric labels."""


def _default_timeouts() -> Timeouts:
    return Timeouts()


def _count_nothing(_: str) -> None:
    return


@dataclass(slots=True)
class ClientRules:
    """Asked and told by the connections.

    Args:
        timeouts: those in force, since a reload may change them.
        closed: told why a connection is closed, one of ``CLOSE_REASONS``.
        descriptors: what is kept free; None while the process does not listen yet.
        idle: ends connections that no request comes on.
    """

    timeouts: Callable[[], Timeouts] = _default_timeouts
    closed: Callable[[str], None] = _count_nothing
    descriptors: DescriptorReserve | None = None
    idle: Expiry = field(default_factory=lambda: Expiry(KEEP_ALIVE_S))
