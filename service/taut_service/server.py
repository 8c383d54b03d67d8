"""uvicorn, run from Python, with a drain before the end.

uvicorn stops listening at the first signal; readiness could then say nothing, and at the end it
raises the signal again, so that the exit code is not 0. Here the first SIGTERM or SIGINT begins
the drain with the socket still open, the second ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

import uvicorn

from taut_service.front import Front
from taut_service.protocol import BoundedHttpProtocol

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
BACKLOG = 2048
CLOSE_TIMEOUT_S = 2
"""Patience with connections that are still open when the drain is over."""


class GatewayServer(uvicorn.Server):
    """A uvicorn server for one :class:`Front`.

    Args:
        app: the application.
        drain_timeout_s: how long running requests may go on after the first signal.
    """

    def __init__(self, app: Front, drain_timeout_s: float) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
        super().__init__(config)
        self._drain = app.drain
        self._drain_timeout_s = drain_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until drained.

        Args:
            sockets: bound sockets to listen on.
        """
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT for as long as the server runs, and keep them once handled."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the drain, or end at once if it has begun. Runs as a signal handler."""
        if self._drain.draining:
            self.force_exit = True
            self.should_exit = True
        elif self._loop is not None:
            self._drain.begin()
            self._loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Start to drain; the server ends when that is done. Runs in the event loop."""
        self._drain.begin()
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        await self._drain.finish(self._drain_timeout_s)
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket before anything else is started; early clients wait in its backlog.

    Args:
        host: name or address.
        port: TCP port; 0 takes a free one.

    Returns:
        The listening socket.

    Raises:
        OSError: the address is taken, not ours, or not an address.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound
