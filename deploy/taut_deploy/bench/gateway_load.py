"""Load for ``taut bench gateway``: closed loop, open loop, disconnects and held streams.

Connections are ``asyncio.Protocol`` objects on uvloop that write prepared bytes and read the
answer with as little work as tells a whole answer from a failed one, so that the generator costs
less than anything it measures. Times are of ``CLOCK_MONOTONIC``, which the mock engine shares.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast

import httptools

HOST = "127.0.0.1"
RECONNECT_S = 0.01
FRESH_S = 4.0
"""Longest pause after which a connection is used again, as clients' pools have one: uvicorn closes
after 5 s, and a request that meets that is lost."""


@dataclass
class Tally:
    """What came of a load. Latencies are seconds from the write of a request to its last byte."""

    done: int = 0
    events: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    open: bool = True

    @property
    def failed(self) -> int:
        """Requests that did not end in a whole 200."""
        return self.failures.total()


class Load(Protocol):
    """Who a visitor reports to."""

    tally: Tally

    def finished(self, visitor: Visitor, status: int, seconds: float) -> None:
        """Handle a whole answer."""

    def lost(self, visitor: Visitor) -> None:
        """Handle a connection that ended; if it was waiting, the failure is already counted."""


def request_bytes(
    body: bytes, headers: Mapping[str, str], path: str, method: str = "POST"
) -> bytes:
    """Return a whole HTTP request."""
    fields = {"host": "bench", "content-type": "application/json", **headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    head = f"{method} {path} HTTP/1.1\r\n{lines}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def chat_body(prompt_bytes: int, stream: bool, mark: str = "") -> bytes:
    """Return a chat request of about that many bytes; the mock engine finds ``mark`` again."""
    message = {"role": "user", "content": (f"mark:{mark} " if mark else "") + "x" * prompt_bytes}
    document = {"model": "m", "messages": [message], "max_tokens": 64}
    return json.dumps({**document, "stream": stream}, allow_nan=False).encode()


class Visitor(asyncio.Protocol):
    """One connection of a client.

    Args:
        load: told of every answer.
        request: bytes to send at each :meth:`ask`.
    """

    def __init__(self, load: Load, request: bytes) -> None:
        self.load = load
        self.request = request
        self.events = 0
        self.waiting = False
        self.asked = 0.0
        self.free_since = 0.0
        self.first_event: asyncio.Future[bool] | None = None
        self._parser: httptools.HttpResponseParser | None = None

    @classmethod
    async def connected(cls, load: Load, port: int, request: bytes) -> Visitor:
        """Connect to a server on this machine; nothing is asked yet."""
        loop = asyncio.get_running_loop()
        _, visitor = await loop.create_connection(lambda: cls(load, request), HOST, port)
        return visitor

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)
        self.free_since = time.monotonic()

    def ask(self) -> None:
        """Send the request."""
        self.waiting = True
        self.asked = time.monotonic()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Read an answer; a whole one in one read needs no parser."""
        if self._parser is None:
            end = data.find(b"\r\n\r\n") + 4
            head = data[:end].lower()
            place = head.find(b"\r\ncontent-length:")
            if place >= 0:
                length = int(head[place + 17 : head.index(b"\r", place + 2)])
                if len(data) == end + length:
                    self._finish(int(data[9:12]))
                    return
            self._parser = httptools.HttpResponseParser(self)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.load.tally.failures["not HTTP"] += 1
            self.waiting = False
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        """Count events (called by llhttp)."""
        count = body.count(b"data:")
        self.events += count
        self.load.tally.events += count
        self._tell(True)

    def on_message_complete(self) -> None:
        """End an answer (called by llhttp)."""
        parser, self._parser = self._parser, None
        assert parser is not None  # noqa: S101 - only a parser calls this
        self._finish(parser.get_status_code())

    def _finish(self, status: int) -> None:
        self.waiting = False
        self._tell(False)
        tally = self.load.tally
        if status == 200:
            tally.done += 1
        else:
            tally.failures[str(status)] += 1
        self.free_since = time.monotonic()
        self.load.finished(self, status, self.free_since - self.asked)

    def connection_lost(self, _: Exception | None) -> None:
        """Count an answer that was still awaited as lost."""
        tally = self.load.tally
        if self.waiting and tally.open:
            tally.failures["connection lost"] += 1
        self._tell(False)
        self.waiting = False
        self.load.lost(self)

    def _tell(self, event: bool) -> None:
        if self.first_event is not None and not self.first_event.done():
            self.first_event.set_result(event)


class _Clients(ABC):
    """Connections that ask one thing, some of them at once.

    Args:
        port: of the server.
        request: what all of them ask.
    """

    def __init__(self, port: int, request: bytes) -> None:
        self.tally = Tally()
        self._port = port
        self._request = request
        self._visitors: set[Visitor] = set()

    async def _connect(self) -> Visitor:
        visitor = await Visitor.connected(self, self._port, self._request)
        self._visitors.add(visitor)
        return visitor

    def _end(self) -> Tally:
        """Hang up; what is open counts no more."""
        self.tally.open = False
        for visitor in list(self._visitors):
            visitor.transport.abort()
        return self.tally

    @abstractmethod
    def finished(self, visitor: Visitor, status: int, seconds: float) -> None:
        """Take note of an answer."""

    def lost(self, visitor: Visitor) -> None:
        """Forget the connection."""
        self._visitors.discard(visitor)


class ClosedLoop(_Clients):
    """``connections`` clients that each ask again as soon as they are answered."""

    def __init__(self, port: int, request: bytes) -> None:
        super().__init__(port, request)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, connections: int, seconds: float) -> Tally:
        """Run for some seconds; unfinished requests at the end count as neither."""
        for _ in range(connections):
            await self._enter()
        await asyncio.sleep(seconds)
        return self._end()

    async def _enter(self) -> None:
        (await self._connect()).ask()

    async def _enter_again(self) -> None:
        await asyncio.sleep(RECONNECT_S)
        if self.tally.open:
            try:
                await self._enter()
            except OSError as problem:
                self.tally.failures[type(problem).__name__] += 1

    def finished(self, visitor: Visitor, status: int, seconds: float) -> None:
        """Ask again."""
        if self.tally.open:
            self.tally.latencies.append(seconds)
            if status == 200:
                visitor.ask()
            else:
                asyncio.get_running_loop().call_later(RECONNECT_S, self._ask_again, visitor)

    def _ask_again(self, visitor: Visitor) -> None:
        if self.tally.open and not visitor.transport.is_closing():
            visitor.ask()

    def lost(self, visitor: Visitor) -> None:
        """Come back with another connection."""
        super().lost(visitor)
        if self.tally.open:
            task = asyncio.get_running_loop().create_task(self._enter_again())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


class OpenLoop(_Clients):
    """Requests at fixed times, whatever the server does; a connection more when none is free.

    A late server therefore meets more requests at once, not fewer. Latencies count from the write,
    ``lags`` say how late the writes were.
    """

    def __init__(self, port: int, request: bytes) -> None:
        super().__init__(port, request)
        self._free: list[Visitor] = []

    async def run(
        self, rate: float, seconds: float, patience_s: float = 2.0, reserve: int = 8
    ) -> Tally:
        """Ask ``rate`` times a second for ``seconds``, then wait for what is still open.

        Args:
            rate: requests a second.
            seconds: how long to ask.
            patience_s: longest wait at the end; what is open then counts as "no answer".
            reserve: connections opened beforehand.
        """
        for _ in range(reserve):
            self._free.append(await self._connect())
        begin = time.monotonic()
        for index in range(int(rate * seconds)):
            due = begin + index / rate
            if (pause := due - time.monotonic()) > 0:
                await asyncio.sleep(pause)
            self.tally.lags.append(time.monotonic() - due)
            (await self._fresh()).ask()
        for _ in range(int(patience_s / 0.01)):
            if not any(visitor.waiting for visitor in self._visitors):
                break
            await asyncio.sleep(0.01)
        self.tally.failures["no answer"] += sum(visitor.waiting for visitor in self._visitors)
        return self._end()

    async def _fresh(self) -> Visitor:
        """Return a free connection, the last used first, or a new one."""
        while self._free:
            visitor = self._free.pop()
            if time.monotonic() - visitor.free_since < FRESH_S:
                return visitor
            visitor.transport.abort()
        return await self._connect()

    def finished(self, visitor: Visitor, status: int, seconds: float) -> None:
        """Take the latency of a good answer; the connection is free again."""
        if status == 200:
            self.tally.latencies.append(seconds)
        self._free.append(visitor)

    def lost(self, visitor: Visitor) -> None:
        """Forget the connection."""
        super().lost(visitor)
        if visitor in self._free:
            self._free.remove(visitor)


class Single:
    """One request on one connection, for clients that leave or hold on."""

    def __init__(self) -> None:
        self.tally = Tally()

    async def ask(self, port: int, request: bytes) -> Visitor:
        """Connect and send; ``first_event`` becomes True at an event, False if none can come."""
        visitor = await Visitor.connected(self, port, request)
        visitor.first_event = asyncio.get_running_loop().create_future()
        visitor.ask()
        return visitor

    def finished(self, visitor: Visitor, status: int, seconds: float) -> None:
        """Take the latency."""
        self.tally.latencies.append(seconds)

    def lost(self, visitor: Visitor) -> None:
        """Nothing to do: the tally has it."""
