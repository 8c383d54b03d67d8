"""A starting gateway listens when it knows its workers: its first request is not turned away."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from gateway_harness import COMPLETION, QUICK, gateway, settings_for
from kubernetes_api import FakeApi, endpoint, endpoint_slice
from mock_engine import MockEngine
from test_discovery_gateway import document_for

from taut_service.config.settings import Settings

PATIENT = dataclasses.replace(QUICK, first_look_s=20)
IMPATIENT = dataclasses.replace(QUICK, first_look_s=0.2)
LONGER_THAN_A_TEST_MAY_TAKE_S = 15


@asynccontextmanager
async def silent_worker() -> AsyncIterator[str]:
    """A worker that takes connections and never answers."""
    done = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await done.wait()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        done.set()
        server.close()


async def test_first_request_finds_a_ready_worker() -> None:
    async with (
        MockEngine() as engine,
        gateway(settings_for(engine.url), ready=False, times=PATIENT) as harness,
    ):
        assert (await harness.post(COMPLETION)).status == 200


async def test_one_ready_worker_is_enough() -> None:
    began = time.monotonic()
    async with (
        silent_worker() as silent,
        MockEngine() as engine,
        gateway(settings_for(silent, engine.url), ready=False, times=PATIENT) as harness,
    ):
        assert (await harness.post(COMPLETION)).status == 200
    assert time.monotonic() - began < LONGER_THAN_A_TEST_MAY_TAKE_S


async def test_refused_connection_is_a_verdict(unused_tcp_port: int) -> None:
    began = time.monotonic()
    settings = settings_for(f"http://127.0.0.1:{unused_tcp_port}")
    async with gateway(settings, ready=False, times=PATIENT) as harness:
        assert time.monotonic() - began < LONGER_THAN_A_TEST_MAY_TAKE_S
        assert (await harness.post(COMPLETION)).error["code"] == "no_ready_worker"


async def test_silent_worker_does_not_keep_the_gateway_from_listening() -> None:
    async with (
        silent_worker() as silent,
        gateway(settings_for(silent), ready=False, times=IMPATIENT) as harness,
    ):
        assert (await harness.request("GET", "/health/live")).status == 200
        assert (await harness.post(COMPLETION)).error["code"] == "no_ready_worker"


@pytest.mark.parametrize("known", [True, False])
async def test_discovered_workers_are_waited_for(tmp_path: Path, known: bool) -> None:
    async with MockEngine() as engine, FakeApi(tmp_path) as api:
        if known:
            await api.put(endpoint_slice("one", endpoint("127.0.0.1"), port=engine.port))
        settings = Settings.model_validate(document_for(api))
        began = time.monotonic()
        async with gateway(settings, ready=False, times=PATIENT) as harness:
            assert time.monotonic() - began < LONGER_THAN_A_TEST_MAY_TAKE_S
            assert (await harness.post(COMPLETION)).status == (200 if known else 503)
