"""Everything at once, for a minute (five in full): honest clients among all the others.

Honest clients are served throughout; afterwards nothing is in flight, no descriptor is left and
memory has stayed flat. What each client does comes from one seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from live_processes import House, house, report, scaled
from raw_client import HOST, Client, body_of

SEED = 20261127
SECONDS = max(60, scaled(300))
WORKER = {"ttft_s": 0.02, "chunks": 3000, "chunk_text": "x" * 1500}
TIMES = {
    "connect_s": 2,
    "first_byte_s": 20,
    "idle_s": 20,
    "total_s": 60,
    "write_s": 2,
    "write_min_bytes_per_s": 50_000,
}
ADMISSION = {"max_inflight": 48, "max_queued": 256, "queue_timeout_s": 20}
HONEST, OTHERS = 8, 3
"""Clients at a time: honest ones, and of each other kind."""
COUNTED, LEAST = ("answers", "flood", "leaver", "aborter"), 20
"""What has to come how often, however slow the machine."""
BREATH_S = 0.1
"""Between two visits of a client: without it floods and leavers take all the cores there are, and
mostly from other tests."""
GROWTH_MB, PEAK_MB = 64, 150
"""Most memory gained from the end of the warm-up to the end, and at any time.

The allocator is done growing after some 40 s (147 MB, bodies of up to 3 MB under way). Bodies that
wait for the collector made it 325 MB more.
"""
TRAILERS = b"x-a: bbbbbbbb\r\n" * 1000
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"


class Soak:
    """The clients, and what became of them."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.until, self.least = 0.0, 0
        self.seen: Counter[str] = Counter()

    async def run(self, seconds: float, least: int = 0) -> None:
        """All kinds at work for some time, and until each of ``COUNTED`` came ``least`` times."""
        self.until = time.monotonic() + seconds
        self.least = least
        others = (self.flood, self.slow_reader, self.leaver, self.aborter, self.idler)
        kinds = [self.honest] * HONEST + [other for other in others for _ in range(OTHERS)]
        rngs = (random.Random(f"{SEED}:{number}") for number in range(len(kinds)))
        await asyncio.gather(
            *(self._repeat(kind, rng) for kind, rng in zip(kinds, rngs, strict=True))
        )

    def fewest(self) -> int:
        """Times that the rarest of ``COUNTED`` came."""
        return min(self.seen[kind] for kind in COUNTED)

    async def _repeat(
        self, kind: Callable[[random.Random, Client], Awaitable[None]], rng: random.Random
    ) -> None:
        while time.monotonic() < self.until or self.fewest() < self.least:
            client = await Client.connect(self.port)
            try:
                await kind(rng, client)
            finally:
                client.close()
            self.seen[kind.__name__] += 1
            await asyncio.sleep(BREATH_S)

    async def honest(self, rng: random.Random, client: Client) -> None:
        """Some requests on one connection, each answered whole."""
        for _ in range(rng.randint(1, 20)):
            size = rng.choice((100, 100, 20_000, 300_000))
            stream = rng.random() < 0.5
            client.send(body_of(stream=stream, max_tokens=rng.randint(1, 20), user="u" * size))
            async with asyncio.timeout(30):
                answer = await client.answer()
            assert (answer.status, answer.whole) == (200, True), answer
            assert stream is (answer.body[-14:] == b"data: [DONE]\n\n")
            self.seen["answers"] += 1

    async def flood(self, rng: random.Random, client: Client) -> None:
        """Trailers or a chunk extension without end; the gateway ends it."""
        first = rng.choice((b"0\r\n", b"5;a=", b"%x\r\n%b\r\n0\r\n" % (len(body_of()), body_of())))
        client.writer.write(CHUNKED + first)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 20_000_000:
                client.writer.write(TRAILERS)
                await client.writer.drain()
                sent += len(TRAILERS)
        assert sent < 20_000_000

    async def slow_reader(self, rng: random.Random, client: Client) -> None:
        """A long stream on the smallest receive buffer, hardly read; the gateway ends it."""
        found = socket.socket()
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            found.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(found, (HOST, self.port))
            body = body_of(stream=True, max_tokens=3000)
            head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n"
            await loop.sock_sendall(found, head % len(body) + body)
            pause_s = rng.choice((0.2, 1.0))
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(20):
                    while await loop.sock_recv(found, 1000):  # noqa: ASYNC110 - a slow one
                        await asyncio.sleep(pause_s)
        finally:
            found.close()

    async def leaver(self, rng: random.Random, client: Client) -> None:
        """A large body, perhaps requests ahead, and gone at any moment."""
        body = body_of(stream=rng.random() < 0.5, user="u" * rng.randint(1000, 3_000_000))
        client.send(body)
        if rng.random() < 0.3:
            client.send(body_of())
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(rng.random() * 0.2):
                await client.writer.drain()
        await asyncio.sleep(rng.random() * 0.1)

    async def aborter(self, rng: random.Random, client: Client) -> None:
        """Some of a long stream, then a reset."""
        client.send(body_of(stream=True, max_tokens=2000))
        await client.head()
        # On a busy machine it may be a slow reader, too, and be cut off.
        with contextlib.suppress(ValueError, ConnectionError, asyncio.IncompleteReadError):
            for _ in range(rng.randint(0, 30)):
                await client.chunk()
        bound = client.writer.get_extra_info("socket")
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def idler(self, rng: random.Random, client: Client) -> None:
        """Nothing, or half a head, or half a body."""
        client.writer.write(rng.choice((b"", CHUNKED[:30], CHUNKED + b"100\r\nabc")))
        await asyncio.sleep(rng.random())


def clients_of(home: House) -> int:
    """Connections of clients that the gateway still holds."""
    process = psutil.Process(home.gateway.process.pid)
    found = process.net_connections("tcp")
    return sum(c.laddr.port == home.port and c.status != psutil.CONN_LISTEN for c in found)


def descriptors_of(home: House) -> int:
    """Descriptors of the gateway but for its idle connections to workers."""
    process = psutil.Process(home.gateway.process.pid)
    workers = {engine.port for engine in home.engines}
    pooled = sum(bool(c.raddr) and c.raddr.port in workers for c in process.net_connections("tcp"))
    return int(process.num_fds()) - pooled


@pytest.mark.long  # the fault tests have each client by itself
async def test_nothing_is_left_of_any_client(tmp_path: Path) -> None:
    async with house(tmp_path, behaviour=WORKER, admission=ADMISSION, timeouts=TIMES) as home:
        before = descriptors_of(home)
        soak = Soak(home.port)
        await soak.run(SECONDS / 3)
        await home.quiet(20)
        warm = peak = home.gateway.rss_mb()
        watched = asyncio.create_task(soak.run(SECONDS * 2 / 3, LEAST))
        while not watched.done():
            peak = max(peak, home.gateway.rss_mb())
            await asyncio.wait([watched], timeout=0.2)
        await watched
        await home.quiet(20)
        async with asyncio.timeout(10):
            while clients_of(home):  # noqa: ASYNC110 - another process's
                await asyncio.sleep(0.1)
        growth = home.gateway.rss_mb() - warm
        report(
            f"soak: {SECONDS} s, {dict(sorted(soak.seen.items()))}, memory {warm:.0f} MB warm, "
            f"{growth:+.1f} MB at the end, {peak - warm:+.1f} MB at most"
        )
        assert home.gateway.total("taut_live_requests") == 0
        assert home.gateway.in_flight() == 0
        assert descriptors_of(home) <= before
        assert growth < GROWTH_MB
        assert peak - warm < PEAK_MB
        assert home.gateway.total("taut_client_connections_closed_total", reason="slow_reader") > 0
