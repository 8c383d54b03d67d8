"""Workers from DNS: every A and AAAA record of a name, such as a headless Service.

The resolver is the system's, in a thread of its own. An empty or failed answer keeps the last
known set: name servers fail more often than all workers at once, and a worker that is really
gone is found out by its prober. The system's resolver tells no time to live, so ``every_s`` is
how late a change may be seen.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable

from taut_service.config.settings import DnsDiscovery
from taut_service.worker.discovery.watch import Apply, DiscoveryState, worker_at

LOOKUP_TIMEOUT_S = 10.0
"""Longest wait for one answer; the system's own limit may be longer."""
JITTER = 0.1
"""Share by which pauses differ, so that many gateways do not ask in step."""
Resolve = Callable[[str, int], Awaitable[set[str]]]


class DnsWatch:
    """Looks a name up every so often.

    Args:
        settings: name, port and pause.
        apply: told of every new set.
        resolve: name and port to addresses; raises ``OSError``. Given by tests.
    """

    def __init__(
        self, settings: DnsDiscovery, apply: Apply, resolve: Resolve | None = None
    ) -> None:
        self._settings = settings
        self._resolve = resolve or _system_addresses
        self.state = DiscoveryState(f"dns {settings.host}", apply)

    async def run(self) -> None:
        """Look up for ever; ends by cancellation."""
        while True:
            await self.look_up()
            # Not for secrets.
            spread = random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311
            await asyncio.sleep(self._settings.every_s * spread)

    async def look_up(self) -> None:
        """Look up once."""
        host, port = self._settings.host, self._settings.port
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                addresses = await self._resolve(host, port)
        except TimeoutError:
            self.state.failed(f"no answer within {LOOKUP_TIMEOUT_S:g} s")
        except (OSError, UnicodeError) as error:
            # UnicodeError: a label of the name is empty or longer than 63 characters.
            reason = getattr(error, "strerror", None) or str(error)
            self.state.failed(reason)
        else:
            if addresses:
                self.state.found(worker_at(address, port) for address in addresses)
            else:
                self.state.failed("the answer was empty")


async def _system_addresses(host: str, port: int) -> set[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return {str(entry[4][0]) for entry in found}
