"""File descriptors: the limit is raised, a part of it is kept, idle clients pay for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from gateway_harness import COMPLETION, gateway, settings_for
from live_processes import House, call, eventually, house
from mock_engine import Faults, MockEngine
from raw_client import HOST, Client, body_of, post

from taut_service.config.settings import Timeouts
from taut_service.http.descriptors import LOG_PAUSE_S, DescriptorReserve
from taut_service.worker.upstream import UpstreamClient
from taut_service.worker.upstream_errors import NoDescriptorError

HARD, SOFT = 256, 128
LIMITED = (
    f"import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({SOFT}, {HARD})); "
    "from taut_service.__main__ import main; sys.exit(main(sys.argv[1:]))"
)


@asynccontextmanager
async def limited_house(folder: Path, **settings: Any) -> AsyncIterator[House]:
    """A gateway that may have few descriptors."""
    async with house(folder, **settings) as home:
        door = home.gateway
        await door.kill()
        door.log.unlink()
        door.argv = ["-c", LIMITED, "--config", str(door.file)]
        await door.start_and_wait()
        yield home


@contextlib.contextmanager
def idle_clients(port: int, count: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    found = []
    try:
        for _ in range(count):
            found.append(socket.create_connection((HOST, port), timeout=5))
            with contextlib.suppress(ConnectionError):
                found[-1].sendall(first)
        yield found
    finally:
        for each in found:
            each.close()


def said(home: House) -> list[str]:
    lines = home.gateway.text().splitlines()
    return [line for line in lines if "file descriptors" in line]


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
@pytest.mark.parametrize("first", [b"", b"POST /v1/comp"], ids=["silent", "half a head"])
async def test_idle_clients_beyond_the_limit_keep_nobody_out(tmp_path: Path, first: bytes) -> None:
    async with limited_house(tmp_path) as home:
        process = psutil.Process(home.gateway.process.pid)
        before = process.num_fds()
        assert [f"from {SOFT} to {HARD}" in line for line in said(home)] == [True]
        with idle_clients(home.port, 400, first):
            for _ in range(20):
                assert (await post(home.port, body_of(), timeout_s=3)).status == 200
            assert call(home.port, "GET", "/health/live", timeout_s=3)[0] == 200
            assert call(home.port, "GET", "/health/ready", timeout_s=3)[0] == 200
            assert process.num_fds() < HARD
            closed = home.gateway.total("taut_client_connections_closed_total")
            assert 400 - HARD < closed < 400
        # One line of the start, one of the shortage, however many are closed.
        assert len(said(home)) == 2
        await eventually(lambda: process.num_fds() <= before + 4)


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
async def test_requests_under_way_are_not_closed_for_newcomers(tmp_path: Path) -> None:
    async with limited_house(tmp_path, behaviour={"ttft_s": 1.5}) as home:
        clients = [await Client.connect(home.port) for _ in range(40)]
        for client in clients:
            client.send(body_of())
        await asyncio.sleep(0.5)
        with idle_clients(home.port, 400):
            answers = await asyncio.gather(*(client.answer() for client in clients))
        assert [answer.status for answer in answers] == [200] * 40
        for client in clients:
            client.close()


class Fake:
    def __init__(self, idle_since: float | None, number: int = 0) -> None:
        self.number = number
        self.idle_since = idle_since
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


def test_idlest_go_first_and_the_newcomer_where_all_are_busy() -> None:
    reserve = DescriptorReserve(1000)
    newcomer, busy, old, older = Fake(9.0), Fake(None), Fake(5.0), Fake(1.0)
    everybody = [newcomer, busy, old, older]
    reserve.make_room(newcomer, everybody)
    assert [each.dropped for each in everybody] == [False, False, False, True]
    reserve.make_room(newcomer, [newcomer, busy])
    assert newcomer.dropped
    assert not busy.dropped


def test_of_the_equally_idle_the_oldest_goes_first() -> None:
    everybody = [Fake(5.0, number) for number in (3, 1, 2)]
    DescriptorReserve(1000).make_room(Fake(5.0, 4), everybody)
    assert [each.dropped for each in everybody] == [False, True, False]


def test_shortage_is_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    reserve = DescriptorReserve(1000, lambda: now[0])
    with caplog.at_level(logging.WARNING, "taut_service"):
        for _ in range(50):
            reserve.make_room(Fake(1.0), [Fake(0.0)])
        assert len(caplog.records) == 1
        now[0] += LOG_PAUSE_S
        reserve.make_room(Fake(1.0), [Fake(0.0)])
    assert len(caplog.records) == 2
    assert "closed 50 client connections" in caplog.text


@pytest.mark.parametrize("limit", [64, 256, 1024, 65_536, 1_048_576])
def test_part_kept_leaves_room_for_clients(limit: int) -> None:
    reserve = DescriptorReserve(limit)
    kept = sum(reserve.is_touched_by(number, 1) for number in range(limit))
    assert min(limit // 8, 8) <= kept <= limit // 2


async def test_want_of_descriptors_is_not_the_worker_s_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with MockEngine(Faults()) as engine, gateway(settings_for(engine.url)) as harness:
        client = UpstreamClient(HOST, engine.port, Timeouts())

        async def no_descriptor(*_: object, **__: object) -> None:
            raise OSError(24, "Too many open files")

        loop = asyncio.get_running_loop()
        for _, _, worker in harness.app.reloader.current.workers():
            worker.client.close()
        with monkeypatch.context() as patch:
            patch.setattr(loop, "create_connection", no_descriptor)
            with pytest.raises(NoDescriptorError):
                await client.send(b"GET / HTTP/1.1\r\nhost: t\r\n\r\n", b"")
        # The harness's own connections use the loop, too: the failure is the gateway's only.
        original = UpstreamClient._connect
        monkeypatch.setattr(UpstreamClient, "_connect", _refuse)
        for _ in range(10):
            answer = await harness.post(COMPLETION)
            assert (answer.status, answer.error["code"]) == (503, "worker_unavailable")
        await asyncio.sleep(0.3)
        assert await harness.states() == {"w0": "ready"}
        monkeypatch.setattr(UpstreamClient, "_connect", original)
        assert (await harness.post(COMPLETION)).status == 200


async def _refuse(_: UpstreamClient) -> None:
    raise NoDescriptorError("Too many open files")
