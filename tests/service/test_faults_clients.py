"""Clients that are slow, many, silent, endless or gone, against a gateway process.

What must hold: they cost bounded memory, the others are served meanwhile, and once they have left
nothing is counted any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from live_processes import House, call, eventually, house, report, scaled
from patience import HANGS_S, timed, within
from raw_client import CHAT, COMPLETIONS, HOST, Client, body_of, exchange, post

from taut_deploy.bench.gateway_load import Single, chat_body, request_bytes

LARGE_STREAM = {"chunks": 20_000, "chunk_text": "x" * 4096}
"""82 MB when read to the end."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"


@asynccontextmanager
async def crowd(port: int, count: int, data: bytes = b"") -> AsyncIterator[list[Client]]:
    """Connections that have sent ``data`` and do nothing more."""
    clients: list[Client] = []
    try:
        for begin in range(0, count, 100):
            wanted = min(100, count - begin)
            clients += await asyncio.gather(*(Client.connect(port) for _ in range(wanted)))
        for client in clients:
            client.writer.write(data)
        yield clients
    finally:
        for client in clients:
            client.close()


async def served_within(home: House, seconds: float) -> None:
    """Others are served meanwhile."""
    assert (await within(seconds, post(home.port, body_of()))).status == 200


async def test_readers_that_do_not_read_hold_the_worker_back_and_no_memory(tmp_path: Path) -> None:
    async with house(tmp_path, behaviour=LARGE_STREAM) as home:
        home.engines[0].behave(chunks=4)
        await served_within(home, 5)
        home.engines[0].behave(**LARGE_STREAM)
        before = home.gateway.rss_mb()
        request = request_bytes(body_of(stream=True), {}, COMPLETIONS)
        async with crowd(home.port, 20) as clients:
            for client in clients:
                client.writer.transport.pause_reading()  # type: ignore[attr-defined]
                client.writer.write(request)
            await asyncio.sleep(1.5)
            assert home.engines[0].state()["open"] == 20, "82 MB cannot have fitted in buffers"
            assert home.gateway.rss_mb() - before < 40
            home.engines[0].behave(chunks=4)
            await served_within(home, 2)
        await home.quiet()


async def test_reader_that_reads_slowly_gets_everything(tmp_path: Path) -> None:
    async with house(tmp_path, behaviour={"chunks": 500, "chunk_text": "x" * 4096}) as home:
        client = await Client.connect(home.port)
        client.send(body_of(stream=True))
        got = b""
        async with asyncio.timeout(HANGS_S):
            while b"data: [DONE]" not in got:
                got += await client.reader.read(65536)
                await asyncio.sleep(0.01)
        assert got.count(b"data: ") == 501
        client.close()
        await home.quiet()


async def test_body_that_stops_coming_ends_in_408_and_others_are_served(tmp_path: Path) -> None:
    timeouts = {"connect_s": 5, "first_byte_s": 10, "idle_s": 2, "total_s": 30}
    async with house(tmp_path, timeouts=timeouts) as home:
        unfinished = HEAD + b'content-length: 100\r\n\r\n{"model"'
        async with crowd(home.port, 200, unfinished) as clients:
            await served_within(home, 2)
            async with asyncio.timeout(HANGS_S):
                answers = await asyncio.gather(*(client.answer() for client in clients))
        assert {answer.status for answer in answers} == {408}
        await home.quiet()


async def test_writer_of_one_byte_at_a_time_is_served(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        client = await Client.connect(home.port)
        body = body_of()
        for byte in HEAD + b"content-length: %d\r\n\r\n" % len(body) + body:
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0.001)
        assert (await client.answer()).status == 200
        client.close()


async def test_half_heads_do_not_keep_others_out(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        async with crowd(home.port, 500, HEAD):
            await served_within(home, 2)
        await home.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_closes_its_sending_side_leaves_nothing_behind(
    tmp_path: Path, stream: bool
) -> None:
    async with house(tmp_path, behaviour={"itl_s": 0.05, "chunks": 20}) as home:
        request = request_bytes(body_of(stream=stream), {}, COMPLETIONS)
        async with crowd(home.port, 20, request) as clients:
            await asyncio.sleep(0.2)
            for client in clients:
                client.writer.write_eof()
            # Served to the end or hung up on, but not held.
            async with asyncio.timeout(HANGS_S):
                for client in clients:
                    with contextlib.suppress(asyncio.IncompleteReadError):
                        await client.answer()
        await home.quiet()


async def test_ten_thousand_idle_connections_do_not_keep_others_out(tmp_path: Path) -> None:
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 500
    count = min(10_000, room)
    report(f"idle connections held: {count} (limit of open files allows {room})")
    async with house(tmp_path) as home:
        before = home.gateway.rss_mb()
        async with crowd(home.port, count):
            await served_within(home, 5)
            grown = home.gateway.rss_mb() - before
            report(f"memory of {count} idle connections: {grown:.0f} MB")
            assert grown < 200
        await served_within(home, 5)
        await home.quiet()


async def test_endless_head_is_cut_off(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        before = home.gateway.rss_mb()
        lines = b"".join(b"x-%d: %b\r\n" % (i, b"v" * 1000) for i in range(2000))
        answers = await asyncio.gather(
            *(exchange(home.port, HEAD + lines, patience_s=5) for _ in range(20))
        )
        assert all(not a or a.startswith(b"HTTP/1.1 4") for a in answers)
        assert home.gateway.rss_mb() - before < 40
        await served_within(home, 2)
        await home.quiet()


async def test_one_header_line_without_end_is_cut_off(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        answer = await exchange(home.port, HEAD + b"x: " + b"v" * 3_000_000, patience_s=5)
        assert not answer or answer.startswith(b"HTTP/1.1 4")
        await served_within(home, 2)


@pytest.mark.parametrize("framing", ["content-length", "chunked"])
async def test_flood_of_body_is_refused_in_bounded_memory(tmp_path: Path, framing: str) -> None:
    async with house(tmp_path, limits={"max_body_bytes": 1_000_000}) as home:
        await served_within(home, 5)
        before = home.gateway.rss_mb()
        if framing == "chunked":
            head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
            flood = head + b"10000\r\n" + b"x" * 65536 + b"\r\n"
            flood += 300 * (b"10000\r\n" + b"x" * 65536 + b"\r\n")
        else:
            flood = HEAD + b"content-length: 20000000\r\n\r\n" + b"x" * 20_000_000
        answers = await asyncio.gather(
            *(exchange(home.port, flood, patience_s=5) for _ in range(10))
        )
        # A refusal may be lost with the connection that is closed on a client still sending.
        assert all(not answer or b" 413 " in answer[:20] for answer in answers)
        assert any(answers)
        assert home.gateway.rss_mb() - before < 60
        assert home.engines[0].state()["started"] == 1
        await home.quiet()


async def test_nothing_stays_counted_after_random_disconnects(tmp_path: Path) -> None:
    """10,000 in full: at every point of a request's life, whole and streamed."""
    count = scaled(10_000)
    chance = random.Random(4)
    gate = asyncio.Semaphore(50)

    async def leave(home: House) -> None:
        stream = chance.random() < 0.5
        request = request_bytes(chat_body(500, stream), {}, CHAT)
        end = len(request) if chance.random() < 0.8 else chance.randrange(1, len(request))
        async with gate:
            client = await Client.connect(home.port)
            client.writer.write(request[:end])
            if chance.random() < 0.8:
                await asyncio.sleep(chance.uniform(0, 0.06))
            if chance.random() < 0.3:
                client.writer.write_eof()
            client.close()

    admission = {"max_inflight": 20, "max_queued": 10, "queue_timeout_s": 0.05}
    behaviour = {"ttft_s": 0.01, "itl_s": 0.005, "chunks": 8}
    async with house(tmp_path, engines=2, behaviour=behaviour, admission=admission) as home:
        await asyncio.gather(*(leave(home) for _ in range(count)))
        await home.quiet(20)
        assert home.gateway.in_flight() == 0
        left = home.gateway.total("taut_disconnects_total")
        aborted = sum(engine.state()["aborted"] for engine in home.engines)
        report(f"random disconnects: {count}, {left:.0f} noticed, {aborted} ended at a worker")
        assert left > 0
        assert aborted > 0
        assert home.malformed() == []
        await served_within(home, 2)


async def test_series_stay_constant_under_junk_model_names(tmp_path: Path) -> None:
    """100,000 in full."""
    count = scaled(100_000)
    connections = 32

    async def ask(port: int, numbers: range) -> None:
        client = await Client.connect(port)
        for number in numbers:
            client.send(body_of(model=f"junk-{number}", user=f"u{number}"), COMPLETIONS)
            assert (await client.answer()).status == 404
        client.close()

    async with house(tmp_path) as home:
        await served_within(home, 5)
        await ask(home.port, range(1))
        before, memory = set(home.gateway.series()), home.gateway.rss_mb()
        each = count // connections
        parts = (range(i * each, (i + 1) * each) for i in range(connections))
        await asyncio.gather(*(ask(home.port, part) for part in parts))
        assert set(home.gateway.series()) == before
        assert home.gateway.rss_mb() - memory < 20
        report(f"junk model names: {each * connections}, series: {len(before)}")


async def test_two_thousand_open_streams_leave_health_prompt(tmp_path: Path) -> None:
    admission = {"max_inflight": 3000}
    timeouts = {"connect_s": 5, "first_byte_s": 20, "idle_s": 30, "total_s": 120}
    behaviour = {"itl_s": 1, "chunks": 60}
    async with house(tmp_path, behaviour=behaviour, admission=admission, timeouts=timeouts) as home:
        request = request_bytes(body_of(stream=True), {}, COMPLETIONS)
        visitors = []
        for _ in range(20):
            visitors += await asyncio.gather(
                *(Single().ask(home.port, request) for _ in range(100))
            )
        async with asyncio.timeout(HANGS_S):
            firsts = [v.first_event for v in visitors if v.first_event is not None]
            assert all(await asyncio.gather(*firsts))
        asked = asyncio.to_thread(call, home.port, "GET", "/health/live")
        (status, _), seconds = await timed(asked, 0.5)
        assert status == 200
        report(f"/health/live with 2,000 streams: {seconds:.3f} s")
        rss = home.gateway.rss_mb()
        report(f"memory with 2,000 streams: {rss:.0f} MB")
        assert rss <= 110
        for visitor in visitors:
            visitor.load.tally.open = False
            visitor.transport.abort()
        await home.quiet(20)


async def test_connections_beyond_the_limit_of_files_do_not_end_the_gateway(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        resource.prlimit(home.gateway.process.pid, resource.RLIMIT_NOFILE, (200, 200))
        opened: list[asyncio.StreamWriter] = []
        for _ in range(400):
            _, writer = await asyncio.open_connection(HOST, home.port)
            opened.append(writer)
        await asyncio.sleep(0.5)
        assert home.gateway.running
        for writer in opened:
            writer.transport.abort()
        await asyncio.sleep(0.5)
        await eventually(lambda: home.gateway.ready(), 15)
        await served_within(home, 5)
