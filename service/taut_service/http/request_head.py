"""What the parser of a client's connection asks for with every head; compiled where that is done.

:mod:`taut_service.http.protocol`, which it is for, inherits from uvicorn's class and stays Python.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


def why_ambiguous(version: str, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Say why a request could mean something else to another server.

    Args:
        version: of HTTP, such as ``1.1``.
        headers: names in lower case.

    Returns:
        A sentence, or None for a request that is clear.
    """
    hosts = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            return "the only transfer coding taken here is chunked"
    if hosts == 1 and version == "1.1":
        return None
    if version not in ("1.0", "1.1"):
        return "the request is neither HTTP/1.1 nor HTTP/1.0"
    if hosts > 1:
        return "the request has more than one Host"
    return None if version == "1.0" else "the request has no Host"


class Signal:
    """An ``asyncio.Event`` that costs next to nothing while nobody waits for it."""

    __slots__ = ("_is_set", "_waiters")

    def __init__(self) -> None:
        self._is_set = False
        # asyncio's has a deque from the beginning: half a kilobyte for each connection and request.
        self._waiters: list[asyncio.Future[None]] | None = None

    def set(self) -> None:
        """Let who waits go on."""
        self._is_set = True
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)

    def clear(self) -> None:
        """Have who comes wait."""
        self._is_set = False

    async def wait(self) -> None:
        """Wait for :meth:`set`."""
        if self._is_set:
            return
        if self._waiters is None:
            self._waiters = []
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter
