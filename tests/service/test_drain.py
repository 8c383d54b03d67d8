"""SIGTERM, in a real process: readiness falls at once, live streams finish, the exit code is 0."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml
from gateway_harness import COMPLETION, Client, Harness, eventually, gateway, settings_for
from mock_engine import Faults, MockEngine
from patience import within

from taut_service.errors import UnavailableError
from taut_service.expiry import Expiry
from taut_service.http.request_watch import RequestWatch
from taut_service.watch.drain import Drain


@asynccontextmanager
async def gateway_process(
    folder: Path, url: str, drain_timeout_s: float
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    settings = settings_for(url, drain_timeout_s=drain_timeout_s)
    file = folder / "gateway.yaml"
    file.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    command = [sys.executable, "-m", "taut_service", "--config", str(file), "--port", "0"]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(20):
            line = json.loads(await process.stderr.readline())
            port = int(line["message"].rsplit(":", 1)[1])
            await eventually(lambda: is_ready(port), 20)
        yield process, port
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def is_ready(port: int) -> bool:
    return (await ask(port, "GET", "/health/ready"))[0] == 200


async def connect(port: int) -> Client:
    return Client(*await asyncio.open_connection("127.0.0.1", port))


async def ask(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    client = await connect(port)
    await client.send(method, path, body)
    answer = await client.answer()
    client.close()
    return answer.status, answer.body


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_live_stream_finishes_and_the_process_exits_0(
    tmp_path: Path, number: signal.Signals
) -> None:
    faults = Faults(tokens=40, interval_s=0.02)
    async with (
        MockEngine(faults) as engine,
        gateway_process(tmp_path, engine.url, 20) as (process, port),
    ):
        client = await connect(port)
        await client.begin_stream()
        process.send_signal(number)

        async def refuses() -> bool:
            return (await ask(port, "GET", "/health/ready"))[0] == 503

        await eventually(refuses, 0.5)
        report = json.loads((await ask(port, "GET", "/health/ready"))[1])
        assert report["status"] == "draining"
        assert report["models"]["m"]["workers"][0]["state"] == "draining"
        assert (await ask(port, "GET", "/health/live"))[0] == 200
        status, refusal = await ask(
            port, "POST", "/v1/completions", json.dumps(COMPLETION).encode()
        )
        assert status == 503
        assert json.loads(refusal)["error"]["code"] == "draining"
        text = b"".join([chunk async for chunk in client.chunks()])
        assert text.count(b" tok") == 40
        assert text.endswith(b"data: [DONE]\n\n")
        stdout, stderr = await within(5, process.communicate())
        assert process.returncode == 0
        assert b"Traceback" not in stderr
        log = [json.loads(line) for line in stdout.splitlines()]
        assert {line["status"] for line in log} == {200, 503}
        assert b"hello" not in stdout + stderr
        assert engine.aborted == 0


async def test_stream_that_outlives_the_drain_is_ended_with_an_error_event(tmp_path: Path) -> None:
    faults = Faults(tokens=1000, interval_s=0.02)
    async with (
        MockEngine(faults) as engine,
        gateway_process(tmp_path, engine.url, 0.2) as (process, port),
    ):
        client = await connect(port)
        await client.begin_stream()
        process.terminate()
        text = b"".join([chunk async for chunk in client.chunks()])
        last = json.loads(text.split(b"\n\n")[-2].removeprefix(b"data: "))
        assert last["error"]["code"] == "shutting_down"
        assert await within(8, process.wait()) == 0
        await eventually(lambda: engine.aborted == 1)


async def test_idle_gateway_ends_at_once(tmp_path: Path) -> None:
    async with (
        MockEngine() as engine,
        gateway_process(tmp_path, engine.url, 20) as (process, port),
    ):
        idle = await connect(port)
        await idle.send("GET", "/health/live")
        await idle.answer()
        process.terminate()
        assert await within(5, process.wait()) == 0
        idle.close()


async def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    async with (
        MockEngine(Faults(tokens=1000, interval_s=0.05)) as engine,
        gateway_process(tmp_path, engine.url, 60) as (process, port),
    ):
        client = await connect(port)
        await client.send(
            "POST", "/v1/completions", json.dumps({**COMPLETION, "stream": True}).encode()
        )
        await client.head()
        process.terminate()
        await asyncio.sleep(0.2)
        assert process.returncode is None
        process.terminate()
        await within(8, process.wait())


async def test_queued_request_is_served_within_the_drain() -> None:
    admission = {"max_inflight": 1}
    async with (
        MockEngine(Faults(latency_s=0.2)) as engine,
        gateway(settings_for(engine.url, admission=admission)) as harness,
    ):
        running = [asyncio.create_task(harness.post(COMPLETION)) for _ in range(2)]
        await eventually(lambda: queued(harness))
        harness.server.begin_drain()
        answers = await asyncio.gather(*running)
        assert [answer.status for answer in answers] == [200, 200]


async def queued(harness: Harness) -> bool:
    return await harness.metric("taut_queued_requests") == 1


async def test_taken_port_is_one_line(tmp_path: Path) -> None:
    async with MockEngine() as engine:
        file = tmp_path / "gateway.yaml"
        file.write_text(yaml.safe_dump(settings_for(engine.url).model_dump(mode="json")))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "taut_service", "--config", str(file)),
            *("--port", str(engine.port)),
            stderr=asyncio.subprocess.PIPE,
        )
        _, stderr = await process.communicate()
        assert process.returncode == 1
        expected = f"taut-gateway: cannot listen on 127.0.0.1:{engine.port}: Address already in use"
        assert stderr.decode().splitlines() == [expected]


def is_open(drain: Drain) -> bool:
    try:
        drain.check_open()
    except UnavailableError:
        return False
    return True


async def test_drain_accepts_for_a_while_and_a_second_call_can_only_shorten_it() -> None:
    now = 100.0
    drain = Drain(lambda: now)
    assert is_open(drain)
    drain.begin(accept_s=10)
    assert drain.draining
    assert is_open(drain)
    drain.begin(accept_s=60)
    now = 110.0
    assert not is_open(drain)
    assert drain.reopen()
    assert is_open(drain)
    drain.begin(accept_s=10)
    assert is_open(drain)
    drain.begin()
    assert not is_open(drain)


async def test_what_is_ending_cannot_be_reopened_and_can_be_hurried() -> None:
    drain = Drain()
    watch = RequestWatch(never, Expiry(60))
    drain.enter(watch)
    finishing = asyncio.create_task(drain.finish(60))
    await asyncio.sleep(0)
    assert not drain.reopen()
    assert drain.draining
    drain.hurry()
    drain.leave(watch)
    assert await within(1, finishing)


async def never() -> dict[str, object]:
    await asyncio.Event().wait()
    return {}
