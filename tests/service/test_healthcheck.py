"""``taut-healthcheck``: what probes and stop hooks of a container run, as a process."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import time
from pathlib import Path

import pytest
from admin_harness import administered
from gateway_harness import gateway, settings_for
from mock_engine import Faults, MockEngine

from taut_deploy.ports import free_port

ADMIN_KEY = "sk-admin"
KEYS = [
    {"name": "root", "sha256": hashlib.sha256(ADMIN_KEY.encode()).hexdigest(), "scopes": ["admin"]},
]


async def check(*words: str, **variables: object) -> tuple[int, str]:
    """Run the command beside the gateway; return its exit code and what it said."""
    named = {f"TAUT_{name.upper()}": str(value) for name, value in variables.items()}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "taut_service.healthcheck", *words),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONSAFEPATH": "1", **named},
    )
    async with asyncio.timeout(30):
        _, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stderr.decode()


async def test_live_and_ready_ask_once() -> None:
    async with (
        MockEngine(Faults(health=500)) as engine,
        gateway(settings_for(engine.url, golden=False), ready=False) as harness,
    ):
        assert await check(gateway_port=harness.port) == (0, "")
        assert await check("live", gateway_port=harness.port) == (0, "")
        code, said = await check("ready", gateway_port=harness.port)
        assert (code, said.count("\n")) == (1, 1)
        assert "/health/ready: status 503" in said
        engine.faults.health = 200
        await harness.wait_ready()
        assert await check("ready", gateway_port=harness.port) == (0, "")


async def test_drained_waits_for_the_last_stream() -> None:
    async with (
        MockEngine(Faults(tokens=40, interval_s=0.05)) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        assert await check("drained", gateway_port=harness.port) == (0, "")
        client = await harness.connect()
        await client.begin_stream()
        code, said = await check("drained", "--timeout", "0.3", gateway_port=harness.port)
        assert code == 1
        assert '"live":1' in said
        waiting = asyncio.create_task(check("drained", gateway_port=harness.port))
        text = b"".join([chunk async for chunk in client.chunks()])
        assert not waiting.done()
        assert text.count(b" tok") == 40
        assert await waiting == (0, "")
        client.close()


async def test_drain_tells_the_admin_api_and_waits(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(ADMIN_KEY + "\n")
    async with (
        MockEngine(Faults(tokens=20, interval_s=0.05)) as engine,
        administered(settings_for(engine.url, admin={"port": 0}, api_keys=KEYS)) as admin,
    ):
        ports = {"gateway_port": admin.harness.port, "admin_port": admin.port}
        code, said = await check("drain", **ports)
        assert (code, "status 401" in said) == (1, True)
        assert not admin.harness.app.drain.draining
        started = time.monotonic()
        variables = {**ports, "admin_key_file": key}
        assert await check("drain", "--accept", "0.5", **variables) == (0, "")
        assert time.monotonic() - started >= 0.5
        assert admin.harness.app.drain.draining


async def test_no_gateway_is_not_a_drained_one() -> None:
    for word in ("live", "drained", "drain"):
        code, said = await check(word, gateway_port=free_port(), admin_port=free_port())
        assert code == 1
        assert "Connection refused" in said
        assert "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["nonsense"], {}),
        (["drained", "--timeout", "-1"], {}),
        (["drained", "--timeout", "soon"], {}),
        ([], {"gateway_port": "http"}),
        ([], {"gateway_port": 0}),
        ([], {"gateway_tls": "yes"}),
        (["drain"], {"admin_port": 70000}),
        (["drain"], {"admin_key_file": "/nonexistent/key"}),
    ],
)
async def test_wrong_use_is_exit_2_and_no_traceback(
    words: list[str], variables: dict[str, object]
) -> None:
    code, said = await check(*words, **variables)
    assert code == 2
    assert "Traceback" not in said
    assert said
