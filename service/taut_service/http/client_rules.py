"""What holds for every client's connection of one listener."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from taut_service.config.settings import Timeouts
from taut_service.expiry import Expiry
from taut_service.http.descriptors import DescriptorReserve

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
        unread: looks at connections whose last answer has ended, whether all of it was taken.
        idle: ends those that no request came on after that.
    """

    timeouts: Callable[[], Timeouts] = _default_timeouts
    closed: Callable[[str], None] = _count_nothing
    descriptors: DescriptorReserve | None = None
    unread: Expiry = field(init=False)
    idle: Expiry = field(init=False)

    def __post_init__(self) -> None:
        """Make what counts the times."""
        self.renew()

    def renew(self) -> None:
        """Count the times now in force; connections that are idle already keep theirs."""
        times = self.timeouts()
        self.unread = Expiry(times.unread_s)
        self.idle = Expiry(times.keep_alive_s - times.unread_s)
