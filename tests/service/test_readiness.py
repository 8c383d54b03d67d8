"""Ready means: the golden prompt came out right. Everything else is named on /health/ready."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from gateway_harness import COMPLETION, Harness, eventually, gateway, settings_for
from mock_engine import Faults, MockEngine


async def state_is(harness: Harness, worker: str, state: str) -> bool:
    return (await harness.states())[worker] == state


async def test_worker_gets_traffic_after_its_golden_prompt() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        report = (await harness.request("GET", "/health/ready")).json
        assert report["status"] == "ready"
        worker = report["models"]["m"]["workers"][0]
        assert (worker["name"], worker["state"]) == ("w0", "ready")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", worker["since"])
        assert engine.probes == 1
        assert await harness.metric('taut_worker_ready{worker="w0"}') == 1


@pytest.mark.parametrize("token", [" London", "Paris", "", " Paris "])
async def test_worker_with_the_wrong_token_gets_no_traffic(token: str) -> None:
    async with (
        MockEngine(Faults(first_token=token)) as engine,
        gateway(settings_for(engine.url), ready=False) as harness,
    ):
        await eventually(lambda: state_is(harness, "w0", "wrong_token"))
        ready = await harness.request("GET", "/health/ready")
        assert ready.status == 503
        detail = ready.json["models"]["m"]["workers"][0]["detail"]
        assert "' Paris'" in detail and repr(token) in detail
        for stream in (False, True):
            answer = await harness.post({**COMPLETION, "stream": stream})
            assert (answer.status, answer.error["code"]) == (503, "no_ready_worker")
            assert int(answer.headers["retry-after"]) >= 1
        assert engine.started == 0
        engine.faults.first_token = " Paris"
        await harness.wait_ready()
        assert (await harness.post(COMPLETION)).status == 200


@pytest.mark.parametrize(
    "raw",
    [b"{}", b"[]", b"rubbish", b'{"choices":[]}', b'{"choices":[{"text":7}]}', b'{"choices":7}'],
)
async def test_worker_whose_golden_answer_is_no_completion_gets_no_traffic(raw: bytes) -> None:
    reply = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with gateway(settings_for(url), ready=False) as harness:
        await eventually(lambda: state_is(harness, "w0", "wrong_token"))
    server.close()


async def test_without_golden_prompt_health_decides() -> None:
    async with (
        MockEngine(Faults(health=503)) as engine,
        gateway(settings_for(engine.url, golden=False), ready=False) as harness,
    ):
        await asyncio.sleep(0.1)
        assert await state_is(harness, "w0", "starting")
        engine.faults.health = 200
        await harness.wait_ready()
        assert engine.probes == 0


async def test_worker_that_is_not_up_yet_is_starting_and_is_found_when_it_is() -> None:
    engine = MockEngine()
    await engine.start()
    await engine.stop()
    async with gateway(settings_for(engine.url), ready=False) as harness:
        await asyncio.sleep(0.1)
        report = (await harness.request("GET", "/health/ready")).json
        assert report["status"] == "not_ready"
        worker = report["models"]["m"]["workers"][0]
        assert worker["state"] == "starting"
        assert worker["detail"] == "Connection refused"
        await engine.start()
        await harness.wait_ready()
    await engine.stop()


async def test_killed_worker_is_unreachable_and_proves_itself_again_when_it_is_back() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        await engine.stop()
        await eventually(lambda: state_is(harness, "w0", "unreachable"))
        assert (await harness.request("GET", "/health/ready")).status == 503
        engine.faults.first_token = " London"
        await engine.start()
        await eventually(lambda: state_is(harness, "w0", "wrong_token"))
        engine.faults.first_token = " Paris"
        await harness.wait_ready()


async def test_one_ready_worker_of_two_is_enough() -> None:
    async with (
        MockEngine() as good,
        MockEngine(Faults(first_token="?")) as bad,
        gateway(settings_for(good.url, bad.url)) as harness,
    ):
        await eventually(lambda: state_is(harness, "w1", "wrong_token"))
        assert (await harness.request("GET", "/health/ready")).status == 200
        for _ in range(4):
            assert (await harness.post(COMPLETION)).headers["x-taut-worker"] == "w0"


async def test_unhealthy_worker_is_left_out() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        engine.faults.health = 503
        await eventually(lambda: state_is(harness, "w0", "unreachable"))
        report = (await harness.request("GET", "/health/ready")).json
        assert "503" in report["models"]["m"]["workers"][0]["detail"]


async def test_live_says_only_that_the_process_answers() -> None:
    settings = settings_for("http://127.0.0.1:1")
    async with gateway(settings, ready=False) as harness:
        assert (await harness.request("GET", "/health/live")).status == 200
        assert (await harness.request("GET", "/health/ready")).status == 503


@pytest.mark.parametrize(
    ("arguments", "state", "code"),
    [([], "any", 0), (["ready"], "ready", 0), (["ready"], "not", 1), (["x"], "any", 2)],
)
async def test_healthcheck_command(arguments: list[str], state: str, code: int) -> None:
    token = "?" if state == "not" else " Paris"
    async with (
        MockEngine(Faults(first_token=token)) as engine,
        gateway(settings_for(engine.url), ready=state == "ready") as harness,
    ):
        assert await healthcheck(arguments, str(harness.port)) == code


@pytest.mark.parametrize(("port", "code"), [("1", 1), ("x", 2), ("0", 2), ("99999", 2)])
async def test_healthcheck_of_nothing_fails(port: str, code: int) -> None:
    assert await healthcheck([], port) == code


async def healthcheck(arguments: list[str], port: str) -> int:
    def run() -> subprocess.CompletedProcess[Any]:
        return subprocess.run(
            [sys.executable, "-m", "taut_service.healthcheck", *arguments],
            env={**os.environ, "TAUT_GATEWAY_PORT": port},
            capture_output=True,
            timeout=20,
            check=False,
        )

    result = await asyncio.to_thread(run)
    assert b"Traceback" not in result.stderr
    return result.returncode
