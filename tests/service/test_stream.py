"""Streams: bytes unchanged, events whole; a slow client slows the worker at bounded cost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from gateway_harness import CHAT, COMPLETION, eventually, gateway, settings_for
from mock_engine import Faults, MockEngine
from patience import HANGS_S


@pytest.mark.parametrize("chunk", [None, 1, 7, 64])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
async def test_stream_arrives_as_the_worker_sent_it(
    path: str, body: dict[str, object], chunk: int | None
) -> None:
    async with (
        MockEngine(Faults(chunk=chunk)) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        client = await harness.connect()
        await client.send("POST", path, json.dumps(request).encode())
        head = await client.head()
        chunks = [chunk async for chunk in client.chunks()]
        assert head.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert head.headers["x-taut-worker"] == "w0"
        assert all(chunk.endswith(b"\n\n") for chunk in chunks)
        text = b"".join(chunks)
        assert text.count(b" tok") == 4
        assert text.endswith(b"data: [DONE]\n\n")
        client.close()
        model, route = 'model="m"', f'route="{path[4:].replace("/", "_")}"'
        assert await harness.metric(f"taut_generated_tokens_total{{{model}}}") == 4
        assert await harness.metric(f"taut_prompt_tokens_total{{{model}}}") == 5
        counted = f"taut_time_to_first_token_seconds_count{{{model},{route}}}"
        assert await harness.metric(counted) == 1


async def test_events_are_passed_on_as_they_come() -> None:
    async with (
        MockEngine(Faults(tokens=3, interval_s=60)) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        client = await harness.connect()
        await client.begin_stream()
        async with asyncio.timeout(HANGS_S):
            assert b" tok" in await anext(client.chunks())
        assert engine.running == 1
        client.close()


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


async def test_slow_client_stops_the_worker_and_costs_bounded_memory() -> None:
    total = 300_000_000
    faults = Faults(tokens=3000, token="y" * (total // 3000))
    async with MockEngine(faults) as engine, gateway(settings_for(engine.url)) as harness:
        client = await harness.connect()
        body = json.dumps({**COMPLETION, "stream": True}).encode()
        before = resident_bytes()
        await client.send("POST", "/v1/completions", body)
        await client.head()
        worker = next(c for c in engine.connections if not c.writable.is_set() or c.task)
        await eventually(lambda: not worker.writable.is_set())
        await asyncio.sleep(0.3)
        assert engine.running == 1
        # Socket buffers, the held read and two transports: a few megabytes of three hundred.
        assert resident_bytes() - before < 40_000_000
        received = 0
        async for chunk in client.chunks():
            received += chunk.count(b"y")
        assert received == total
        assert resident_bytes() - before < 60_000_000
        await eventually(lambda: engine.completed == 1)
        client.close()


async def test_long_document_is_passed_on_whole() -> None:
    async with (
        MockEngine(Faults(tokens=600_000)) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        answer = await harness.post(COMPLETION)
        assert answer.json["choices"][0]["text"] == " tok" * 600_000
        assert await harness.metric('taut_generated_tokens_total{model="m"}') == 600_000


async def test_long_document_cut_in_the_middle_closes_the_connection() -> None:
    faults = Faults(tokens=600_000, kill_at_byte=2_000_000)
    async with MockEngine(faults) as engine, gateway(settings_for(engine.url)) as harness:
        with pytest.raises(asyncio.IncompleteReadError):
            await harness.post(COMPLETION)
        await eventually(lambda: harness.app.drain.live == 0)
        assert (await harness.request("GET", "/health/live")).status == 200


async def test_document_that_ends_with_the_connection_is_whole() -> None:
    raw = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json\r\n\r\n{}"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n" if b"health" in head else raw)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with gateway(settings_for(url, golden=False)) as harness:
        reply = await harness.post(COMPLETION)
        assert (reply.status, reply.body) == (200, b"{}")
    server.close()


async def test_interim_response_is_skipped() -> None:
    raw = b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    async with MockEngine(Faults(raw=raw)) as engine, gateway(settings_for(engine.url)) as harness:
        reply = await harness.post(COMPLETION)
        assert (reply.status, reply.body) == (200, b"{}")
        assert "link" not in reply.headers


async def test_second_answer_to_one_request_is_not_given_to_the_next() -> None:
    one = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n%b"
    raw = one % b"first" + one % b"extra"
    async with MockEngine(Faults(raw=raw)) as engine, gateway(settings_for(engine.url)) as harness:
        for _ in range(5):
            assert (await harness.post(COMPLETION)).body == b"first"


async def test_client_that_pauses_longer_than_the_idle_limit_is_not_a_silent_worker() -> None:
    faults = Faults(tokens=400, token="y" * 50_000)
    limits = {"idle_s": 0.1, "first_byte_s": 0.1}
    async with (
        MockEngine(faults) as engine,
        gateway(settings_for(engine.url, timeouts=limits)) as harness,
    ):
        client = await harness.connect()
        await client.begin_stream()
        await asyncio.sleep(0.5)
        text = b"".join([chunk async for chunk in client.chunks()])
        assert text.count(b"y") == 400 * 50_000
        assert text.endswith(b"data: [DONE]\n\n")
        client.close()
