"""A client that closes only its sending side gets its answer; one that has left holds nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
from pathlib import Path

import pytest
from certificates import Authority
from gateway_harness import COMPLETION, Client, Harness, eventually, gateway, settings_for
from live_processes import house
from mock_engine import Faults, MockEngine
from patience import within
from raw_client import HOST

from taut_service.config.settings import TlsFiles
from taut_service.http.tls import ServerTls

SLOW = Faults(latency_s=0.3, interval_s=0.05, tokens=4)
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


def request(document: dict[str, object], version: str = "1.1") -> bytes:
    body = json.dumps(document).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: t\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def half_closed(port: int, data: bytes) -> bytes:
    """Send, say that there is no more, and read to the end of the connection."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(20):
            return await reader.read(-1)
    finally:
        writer.transport.abort()


def answers(found: bytes) -> list[tuple[int, bytes, bytes]]:
    """Split final answers into status, head and the rest; interim ones go."""
    while INTERIM in found:
        found = found.replace(INTERIM, b"")
    texts = re.split(rb"(?=HTTP/1\.1 \d)", found)[1:]
    parts = [text.partition(b"\r\n\r\n") for text in texts]
    return [(int(head[9:12]), head, rest) for head, _, rest in parts]


def events(chunked: bytes) -> list[bytes]:
    """Return the events of a stream as a client's parser sees them, comments left out."""
    text, at = b"", 0
    while size := int(chunked[at : chunked.index(b"\r\n", at)], 16):
        start = chunked.index(b"\r\n", at) + 2
        text += chunked[start : start + size]
        at = start + size + 2
    found = [event for event in text.split(b"\n\n") if event]
    return [event for event in found if not event.startswith(b":")]


async def test_whole_answer_and_stream_arrive() -> None:
    async with MockEngine(SLOW) as engine, gateway(settings_for(engine.url)) as harness:
        [(status, head, body)] = answers(await half_closed(harness.port, request(COMPLETION)))
        assert status == 200
        assert b"\r\nconnection: close" in head.lower()
        assert json.loads(body)["usage"]["completion_tokens"] == 4
        streamed = await half_closed(harness.port, request({**COMPLETION, "stream": True}))
        [(status, _, body)] = answers(streamed)
        found = events(body)
        assert (status, found[-1], len(found)) == (200, b"data: [DONE]", 5)
        assert engine.aborted == 0


async def test_requests_sent_ahead_and_large_bodies_are_answered() -> None:
    long = {**COMPLETION, "prompt": "x" * 300_000}
    async with MockEngine(SLOW) as engine:
        settings = settings_for(engine.url, limits={"chars_per_token": 10_000})
        async with gateway(settings) as harness:
            data = request(long) + request(COMPLETION) + request({"model": "unknown"})
            found = answers(await half_closed(harness.port, data))
            assert [status for status, _, _ in found] == [200, 200, 404]
            assert engine.aborted == 0


async def test_quiet_stream_stays_open() -> None:
    """A comment asks whether the client is there; it must not disturb the events."""
    quiet = Faults(interval_s=0.4, tokens=3)
    async with MockEngine(quiet) as engine, gateway(settings_for(engine.url)) as harness:
        reader, writer = await asyncio.open_connection(HOST, harness.port)
        writer.write(request({**COMPLETION, "stream": True}))
        head = await reader.readuntil(b"data: ")
        writer.write_eof()
        async with asyncio.timeout(10):
            found = head + await reader.read(-1)
        writer.transport.abort()
        assert b"3\r\n:\n\n\r\n" in found
        [(_, _, body)] = answers(found)
        assert len(events(body)) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_after_that_is_noticed(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taut_service.http.client_flow.ASK_AGAIN_S", 0.2)
    slow = Faults(latency_s=0.0 if stream else 30.0, interval_s=30.0)
    async with MockEngine(slow) as engine, gateway(settings_for(engine.url)) as harness:
        client = await harness.connect()
        client.writer.write(request({**COMPLETION, "stream": stream}))
        await eventually(lambda: engine.running == 1)
        if stream:
            await client.reader.readuntil(b"data: ")
        client.writer.write_eof()
        await asyncio.sleep(0.5)
        assert engine.running == 1
        client.close()
        await eventually(lambda: engine.aborted == 1, 2)


@pytest.mark.parametrize("data", [b"POST /v1/completions HT", request(COMPLETION)[:-5]])
async def test_unfinished_request_ends_the_connection(data: bytes) -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        assert answers(await half_closed(harness.port, data)) == []
        assert engine.started == 0


async def test_old_client_that_sends_no_more_has_left() -> None:
    """HTTP/1.0 knows no interim answer, so nothing can be asked; common proxies speak it."""
    async with MockEngine(Faults(latency_s=30)) as engine, gateway(settings_for(engine.url)) as h:
        assert await half_closed(h.port, request(COMPLETION, "1.0")) == b""
        await eventually(lambda: engine.aborted == 1)


async def test_connection_is_not_kept_alive() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        found = await half_closed(harness.port, b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n")
        assert [status for status, _, _ in answers(found)] == [200]
        await eventually(lambda: not harness.server.server_state.connections)


async def leaves(harness: Harness, client: Client, engine: MockEngine) -> float:
    """Return after how many seconds the worker hears of it."""
    loop = asyncio.get_running_loop()
    aborted, left = engine.aborted, loop.time()
    client.close()
    await eventually(lambda: engine.aborted == aborted + 1)
    return loop.time() - left


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_at_once_is_noticed_within_milliseconds(stream: bool) -> None:
    slow = Faults(latency_s=0.0 if stream else 30.0, interval_s=30.0)
    async with MockEngine(slow) as engine, gateway(settings_for(engine.url)) as harness:
        seconds = []
        for _ in range(10):
            client = await harness.connect()
            client.writer.write(request({**COMPLETION, "stream": stream}))
            await eventually(lambda: engine.running == 1)
            if stream:
                await client.reader.readuntil(b"data: ")
            seconds.append(await leaves(harness, client, engine))
        assert sorted(seconds)[5] < 0.05


async def test_gateway_process_answers(tmp_path: Path) -> None:
    """Under uvloop, which has transports of its own."""
    async with house(tmp_path, behaviour={"ttft_s": 0.3, "itl_s": 0.05}) as home:
        for stream in (False, True):
            document = {"model": "m", "prompt": "x", "max_tokens": 4, "stream": stream}
            [(status, _, body)] = answers(await half_closed(home.port, request(document)))
            assert status == 200
            assert b"[DONE]" in body if stream else json.loads(body)["choices"]
        with socket.create_connection((HOST, home.port)) as client:
            client.sendall(request({"model": "m", "prompt": "x", "max_tokens": 4}))
        await home.quiet(5)
        assert home.gateway.total("taut_disconnects_total") == 1


async def closed_over_tls(port: int, trust: ssl.SSLContext, engine: MockEngine, how: str) -> bytes:
    """Ask, end the sending side once a worker has the request, return what is answered then.

    Args:
        how: ``close_notify`` ends the TLS session's side, ``fin`` the TCP connection's.
    """
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = trust.wrap_bio(incoming, outgoing, server_hostname="localhost")
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        while True:
            try:
                session.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await reader.read(65536))
        session.write(request(COMPLETION))
        writer.write(outgoing.read())
        await eventually(lambda: engine.running == 1)
        if how == "close_notify":
            with contextlib.suppress(ssl.SSLWantReadError):
                session.unwrap()
            writer.write(outgoing.read())
        else:
            writer.write_eof()
        incoming.write(await within(5, reader.read(-1)))
        incoming.write_eof()
        try:
            return session.read()
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("how", ["close_notify", "fin"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_over_tls_either_end_is_the_end_of_both(
    tmp_path: Path, how: str, version: ssl.TLSVersion
) -> None:
    """The event loop's TLS knows no closed half: such a client has left, and holds nobody."""
    authority = Authority()
    authority.write(tmp_path)
    certificate, key = authority.issue(tmp_path)
    tls = ServerTls(TlsFiles(certificate=certificate, key=key))
    trust = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    trust.minimum_version = trust.maximum_version = version
    slow = Faults(latency_s=30.0)
    async with (
        MockEngine(slow) as engine,
        gateway(settings_for(engine.url), tls=tls) as harness,
    ):
        assert await closed_over_tls(harness.port, trust, engine, how) == b""
        await eventually(lambda: engine.aborted == 1, 2)
        told = harness.app.metrics.exposition().decode()
        assert 'taut_disconnects_total{model="m",route="completions"} 1.0' in told
