"""The admin port of a real process: apart from the public one, and through the end of its life."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from gateway_harness import COMPLETION, Answer, Client, eventually, settings_for
from mock_engine import Faults, MockEngine


class Process:
    """A gateway process with both ports."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, admin_port: int) -> None:
        self.process = process
        self.port = port
        self.admin_port = admin_port
        self.environment = {
            **os.environ,
            "PYTHONSAFEPATH": "1",
            "TAUT_GATEWAY_PORT": str(port),
            "TAUT_ADMIN_PORT": str(admin_port),
        }

    async def ask(self, port: int, method: str, path: str, body: Any = None) -> Answer:
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        data = b"" if body is None else json.dumps(body).encode()
        headers = {"host": "127.0.0.1", "content-type": "application/json"}
        await client.send(method, path, data, headers)
        answer = await client.answer()
        client.close()
        return answer

    async def healthcheck(self, *words: str) -> int:
        command = [sys.executable, "-m", "taut_service.healthcheck", *words]
        run = await asyncio.create_subprocess_exec(*command, env=self.environment)
        return await run.wait()

    async def end(self) -> bytes:
        """Wait for its end; return what it had to say."""
        async with asyncio.timeout(10):
            _, stderr = await self.process.communicate()
        assert b"Traceback" not in stderr, stderr.decode()
        return stderr


@asynccontextmanager
async def process_for(folder: Path, url: str) -> AsyncIterator[Process]:
    settings = settings_for(url, admin={"port": 0}, drain_timeout_s=20)
    file = folder / "gateway.yaml"
    file.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "taut_service", "--config", str(file), "--port", "0"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    assert process.stderr is not None
    try:
        ports = []
        async with asyncio.timeout(20):
            for _ in range(2):
                line = json.loads(await process.stderr.readline())
                ports.append(int(line["message"].rsplit(":", 1)[1]))
        running = Process(process, *ports)

        async def ready() -> bool:
            return (await running.ask(running.port, "GET", "/health/ready")).status == 200

        await eventually(ready, 20)
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_each_port_serves_its_own_paths_only(tmp_path: Path) -> None:
    async with MockEngine() as engine, process_for(tmp_path, engine.url) as running:
        assert (await running.ask(running.admin_port, "GET", "/admin/state")).status == 200
        assert (await running.ask(running.port, "GET", "/admin/state")).status == 404
        assert (await running.ask(running.port, "POST", "/admin/drain")).status == 404
        assert (
            await running.ask(running.port, "POST", "/v1/completions", COMPLETION)
        ).status == 200
        answer = await running.ask(running.admin_port, "POST", "/v1/completions", COMPLETION)
        assert answer.status == 404
        # An open connection to the admin port does not hold the end up.
        idle = Client(*await asyncio.open_connection("127.0.0.1", running.admin_port))
        await idle.send("GET", "/admin/state", headers={"host": "127.0.0.1"})
        await idle.answer()
        running.process.terminate()
        await running.end()
        idle.close()
        assert running.process.returncode == 0


async def test_the_stop_hook_serves_on_waits_and_lets_the_signal_end_it(tmp_path: Path) -> None:
    faults = Faults(tokens=60, interval_s=0.03)
    async with MockEngine(faults) as engine, process_for(tmp_path, engine.url) as running:
        client = Client(*await asyncio.open_connection("127.0.0.1", running.port))
        stream = json.dumps({**COMPLETION, "stream": True}).encode()
        await client.send("POST", "/v1/completions", stream)
        await client.head()
        hook = asyncio.create_task(running.healthcheck("drain", "--accept", "0.8"))

        async def not_ready() -> bool:
            return (await running.ask(running.port, "GET", "/health/ready")).status == 503

        await eventually(not_ready)
        # Load balancers that have not heard yet are still served.
        late = await running.ask(running.port, "POST", "/tokenize", {"model": "m", "prompt": "x"})
        assert late.status == 200
        text = b"".join([chunk async for chunk in client.chunks()])
        assert not hook.done()
        assert text.endswith(b"data: [DONE]\n\n")
        assert await hook == 0
        assert running.process.returncode is None, "the hook drains, the signal ends"
        # The first signal after a drain by the operator is a first signal.
        running.process.send_signal(signal.SIGTERM)
        await running.end()
        assert running.process.returncode == 0
        client.close()
        assert engine.aborted == 0


async def test_signal_after_an_operators_drain_lets_streams_finish(tmp_path: Path) -> None:
    faults = Faults(tokens=40, interval_s=0.03)
    async with MockEngine(faults) as engine, process_for(tmp_path, engine.url) as running:
        client = Client(*await asyncio.open_connection("127.0.0.1", running.port))
        stream = json.dumps({**COMPLETION, "stream": True}).encode()
        await client.send("POST", "/v1/completions", stream)
        await client.head()
        assert (await running.ask(running.admin_port, "POST", "/admin/drain")).status == 200
        running.process.terminate()
        await asyncio.sleep(0.1)
        # It is ending now: there is no way back.
        answer = await running.ask(running.admin_port, "POST", "/admin/undrain")
        assert (answer.status, answer.error["code"]) == (409, "ending")
        text = b"".join([chunk async for chunk in client.chunks()])
        assert text.count(b" tok") == 40
        client.close()
        await running.end()
        assert running.process.returncode == 0


async def test_second_signal_cuts_with_a_last_word(tmp_path: Path) -> None:
    faults = Faults(tokens=1000, interval_s=0.03)
    async with MockEngine(faults) as engine, process_for(tmp_path, engine.url) as running:
        client = Client(*await asyncio.open_connection("127.0.0.1", running.port))
        stream = json.dumps({**COMPLETION, "stream": True}).encode()
        await client.send("POST", "/v1/completions", stream)
        await client.head()
        running.process.terminate()
        await asyncio.sleep(0.2)
        assert running.process.returncode is None
        running.process.terminate()
        text = b"".join([chunk async for chunk in client.chunks()])
        last = json.loads(text.split(b"\n\n")[-2].removeprefix(b"data: "))
        assert last["error"]["code"] == "shutting_down"
        await running.end()
        assert running.process.returncode == 0
        client.close()
