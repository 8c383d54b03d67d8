"""uvicorn, run from Python, with a drain before the end.

uvicorn stops listening at the first signal; readiness could then say nothing, and at the end it
raises the signal again, so that the exit code is not 0. Here the first SIGTERM or SIGINT begins
the drain with the socket still open, the second ends what still runs; SIGHUP reads the
configuration again.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from functools import partial
from types import FrameType
from typing import Literal, cast

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from taut_service.config.settings import SettingsError
from taut_service.http.client_rules import ClientRules
from taut_service.http.descriptors import DescriptorReserve, current_limit
from taut_service.http.front import Front
from taut_service.http.protocol import BoundedHttpProtocol
from taut_service.http.small_bodies import SmallBodies
from taut_service.http.tls import ServerTls

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
BACKLOG = 2048
ACCEPTS = 16
"""Connections accepted in one turn of the event loop.

libuv accepts one for each watched socket and turn (libuv/libuv#3696), and a turn of a busy gateway
takes milliseconds: the last of a thousand users who come at once, or a liveness probe behind them,
would wait for as many turns. So the one listening socket is watched under several descriptors.
"""
CLOSE_TIMEOUT_S = 2
"""Patience with connections that are still open when the drain is over."""


class GatewayServer(uvicorn.Server):
    """A uvicorn server for one :class:`Front`.

    Args:
        app: the application.
        drain_timeout_s: how long running requests may go on after the first signal.
        tls: the listener's certificate; None speaks plain HTTP.
        admin: bound socket of the admin API, if the application has one.
    """

    def __init__(
        self,
        app: Front,
        drain_timeout_s: float,
        *,
        tls: ServerTls | None = None,
        admin: socket.socket | None = None,
    ) -> None:
        self._rules = ClientRules(
            lambda: app.reloader.current.settings.timeouts,
            lambda reason: app.metrics.clients_closed[reason].inc(),
        )
        app.reloader.on_change(lambda _: self._rules.renew())
        super().__init__(_config(app, self._rules, lifespan="on"))
        self._app = app
        self._tls = tls
        self._admin_socket = admin
        self._signals_seen = 0
        self._drain = app.drain
        self._reloader = app.reloader
        self._reload: asyncio.Task[None] | None = None
        self._drain_timeout_s = drain_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until drained.

        Args:
            sockets: bound sockets to listen on.
        """
        self._loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            if self._tls is not None:
                await stack.enter_async_context(_running(self._tls.run()))
            if self._app.admin is not None and self._admin_socket is not None:
                admin = AdminServer(self._app.admin)
                await stack.enter_async_context(_running(admin.serve([self._admin_socket])))
            await super().serve(watched_often(sockets or []) or None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with the certificate in force."""
        if self._tls is not None:
            # uvicorn would make a context of its own from files, and keep it for ever.
            self.config.ssl = self._tls.context
        await super().startup(sockets)
        self._rules.descriptors = DescriptorReserve(current_limit())

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT for as long as the server runs, and keep them once handled."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self.handle_reload)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the drain; cut it short at the second signal. Runs as a signal handler.

        The third ends the process without a last word to anybody.
        """
        self._signals_seen += 1
        if self._loop is None or self._signals_seen > 2:
            self.force_exit = True
            self.should_exit = True
        elif self._signals_seen == 2:
            self._loop.call_soon_threadsafe(self._drain.hurry)
        else:
            self._drain.begin()
            self._loop.call_soon_threadsafe(self.begin_drain)

    def handle_reload(self, sig: int, frame: FrameType | None) -> None:
        """Have the configuration read again. Runs as a signal handler."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.begin_reload)

    def begin_reload(self) -> None:
        """Start to reload. Runs in the event loop."""
        self._reload = asyncio.get_running_loop().create_task(self._reload_configuration())

    async def _reload_configuration(self) -> None:
        # A bad file is in the log, each reason on a line, and the old configuration is in force.
        with contextlib.suppress(SettingsError):
            await self._reloader.reload()

    def begin_drain(self) -> None:
        """Start to drain; the server ends when that is done. Runs in the event loop."""
        self._drain.begin()
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        await self._drain.finish(self._drain_timeout_s)
        self.should_exit = True


class AdminServer(uvicorn.Server):
    """A uvicorn server for the admin API; ends by cancellation, leaves signals to the gateway's.

    Args:
        app: the admin application.
    """

    def __init__(self, app: FastAPI) -> None:
        super().__init__(_config(SmallBodies(app), ClientRules(), lifespan="off"))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def _config(app: ASGIApp, rules: ClientRules, *, lifespan: Literal["on", "off"]) -> uvicorn.Config:
    """Return how uvicorn serves one listener: our protocol, our log, our headers."""
    # Only ever called, as a factory.
    protocol = cast("type[asyncio.Protocol]", partial(BoundedHttpProtocol, rules=rules))
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan=lifespan,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
    )


@contextlib.asynccontextmanager
async def _running(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run something beside the server, for as long as the block lasts."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def watched_often(sockets: list[socket.socket]) -> list[socket.socket]:
    """Return listening sockets with their duplicates, so that each turn accepts :data:`ACCEPTS`.

    Args:
        sockets: bound; whoever takes the list closes every socket in it.
    """
    return sockets + [bound.dup() for bound in sockets for _ in range(ACCEPTS - 1)]


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
