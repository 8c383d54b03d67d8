"""A worker's address and the idle connections to it.

``send`` hands back a :class:`Connection` whose answer has begun. A pooled connection that the
worker closed between two requests is replaced by a fresh one, once, and only if not one byte of
an answer had come: uvicorn drops idle connections after five seconds, so this is the ordinary
case, not a fault. Retrying elsewhere is the gateway's decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from taut_service.config.settings import Timeouts
from taut_service.worker.connection import Connection
from taut_service.worker.upstream_errors import ConnectError, ConnectionLostError, NoDescriptorError

MAX_IDLE = 256
"""Idle connections kept per worker; more than this were opened by a burst."""
MAX_ANSWER_BYTES = 1024 * 1024
"""Of a probe or a scrape, unless it says otherwise."""


class UpstreamClient:
    """Keep-alive connections to one host and port. Belongs to one event loop.

    Args:
        host: name or address.
        port: TCP port.
        timeouts: limits on connecting and on silence.
        on_stale: told when a pooled connection turned out to be closed.
    """

    def __init__(
        self,
        host: str,
        port: int,
        timeouts: Timeouts,
        on_stale: Callable[[], None] = lambda: None,
    ) -> None:
        self._host, self._port, self._timeouts = host, port, timeouts
        self._on_stale = on_stale
        self._retired = False
        # Last in, first out: the most recently used is the least likely to have been closed. A
        # dict, for removal in O(1).
        self._idle: dict[Connection, None] = {}
        literal = f"[{host}]" if ":" in host else host
        self.authority = f"{literal}:{port}".encode()
        self._has_key = False
        self.use_key(None)

    @property
    def idle(self) -> int:
        """Pooled connections now."""
        return len(self._idle)

    def use_key(self, key: bytes | None) -> None:
        """Send a key with every request from now on, None for none."""
        self._has_key = key is not None
        shown = b"" if key is None else b"authorization: Bearer %b\r\n" % key
        self._head_end = b"host: %b\r\n%b\r\n" % (self.authority, shown)

    def whole_head(self, head: bytes) -> bytes:
        """Return the head of a request with what only this worker is to see.

        Args:
            head: request line and headers without ``Host`` and the empty line. A client's
                ``Authorization`` gives way to the worker's key.
        """
        if self._has_key and b"\r\nauthorization: " in head:
            lines = head.split(b"\r\n")
            head = b"\r\n".join(x for x in lines if not x.startswith(b"authorization: "))
        return head + self._head_end

    async def send(self, head: bytes, body: bytes) -> Connection:
        """Send a request, wait for the head of the answer.

        Args:
            head: request line and headers, with the empty line.
            body: the body.

        Returns:
            The connection, to be read to its end and given to :meth:`give_back`, whatever happens.

        Raises:
            UpstreamError: connecting failed, or the answer did not begin.
        """
        pooled = self._pooled()
        if pooled is not None:
            try:
                pooled.send(head, body)
                await pooled.answered()
            except ConnectionLostError:
                pooled.abort()
                if pooled.got_bytes:
                    raise
                self._on_stale()
            except BaseException:
                # Cancellation included: an abandoned request must not go on running in the worker.
                pooled.abort()
                raise
            else:
                return pooled
        connection = await self._connect()
        try:
            await connection.exchange(head, body)
        except BaseException:
            connection.abort()
            raise
        return connection

    def _pooled(self) -> Connection | None:
        """Take a connection that is open as far as this side knows; None where there is none."""
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.alive:
                return connection
        return None

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes,
        timeout_s: float,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> tuple[int, bytes]:
        """Do one small exchange from beginning to end, beside the requests.

        Args:
            method: GET or POST.
            path: absolute.
            body: JSON, or nothing.
            timeout_s: patience with all of it.
            max_bytes: of the answer's body that are read.

        Returns:
            Status and body, of the latter at most ``max_bytes`` and one read more.

        Raises:
            UpstreamError: connecting failed, or the answer broke off.
            TimeoutError: it took too long.
        """
        pieces: list[bytes] = []
        size = 0
        async with self.answer(method, path, body, timeout_s) as connection:
            while size <= max_bytes and (data := await connection.read()):
                pieces.append(data)
                size += len(data)
        return connection.status, b"".join(pieces)

    @contextlib.asynccontextmanager
    async def answer(
        self, method: str, path: str, body: bytes, timeout_s: float
    ) -> AsyncIterator[Connection]:
        """Do one exchange beside the requests, its answer read piece by piece.

        Args:
            method: GET or POST.
            path: absolute.
            body: JSON, or nothing.
            timeout_s: patience with all of it.

        Yields:
            The connection, the head of the answer read.

        Raises:
            UpstreamError: connecting failed.
            TimeoutError: it took too long.
        """
        head = (
            f"{method} {path} HTTP/1.1\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        )
        async with asyncio.timeout(timeout_s):
            connection = await self.send(self.whole_head(head.encode()), body)
            try:
                yield connection
            finally:
                self.give_back(connection)

    def give_back(self, connection: Connection) -> None:
        """End the exchange; pool the connection, or close it if the answer was not whole."""
        if connection.finish() and len(self._idle) < MAX_IDLE and not self._retired:
            self._idle[connection] = None
        else:
            connection.abort()

    def configure(self, timeouts: Timeouts) -> None:
        """Take over other limits; connections that have the old ones are used no more."""
        if timeouts != self._timeouts:
            self._timeouts = timeouts
            self.close()

    def retire(self) -> None:
        """Keep no connection any longer than its exchange lasts."""
        self._retired = True
        self.close()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            connection, _ = self._idle.popitem()
            connection.abort()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                # A cast, since a connection does not inherit from asyncio's class.
                new = cast("Callable[[], Any]", self._new)
                _, connection = await loop.create_connection(new, self._host, self._port)
        except TimeoutError as error:
            raise ConnectError(f"no connection within {self._timeouts.connect_s:g} s") from error
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise NoDescriptorError(_reason(error)) from error
            raise ConnectError(_reason(error)) from error
        made: Connection = connection
        return made

    def _new(self) -> Connection:
        return Connection(self._forget, self._timeouts)

    def _forget(self, connection: Connection) -> None:
        self._idle.pop(connection, None)


def _reason(error: OSError) -> str:
    """Return the system's words: asyncio's own name the address as well."""
    if error.errno is None or isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno)
