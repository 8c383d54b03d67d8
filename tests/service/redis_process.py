"""A real Redis server for tests: its own process, a free port, nothing on disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from taut_deploy.ports import free_port
from taut_service.config.settings import RedisStore

BINARY = shutil.which("redis-server")


def require_redis() -> None:
    """Skip where there is no server; in CI that is a failure: .ci/run installs it."""
    if BINARY is None:
        reason = "no redis-server on PATH (Debian: apt-get install redis-server)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


class RedisServer:
    """One server; ``kill`` and ``start`` as often as a test likes."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.port = free_port()
        self._folder = folder
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def settings(self, **fields: object) -> RedisStore:
        """Patient settings unless a test is about time: machines that run tests are busy."""
        settings = RedisStore.model_validate({"url": self.url, **fields})
        return settings if "timeout_s" in fields else settings.model_copy(update={"timeout_s": 5.0})

    async def start(self) -> None:
        await asyncio.to_thread(self._start)

    def _start(self) -> None:
        assert BINARY is not None
        command = [BINARY, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([*command, *self._arguments], stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while not self._answers():
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 0.5) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.thaw()
            self.kill()


@asynccontextmanager
async def redis_server(folder: Path, *arguments: str) -> AsyncIterator[RedisServer]:
    require_redis()
    server = RedisServer(folder, *arguments)
    try:
        await server.start()
        yield server
    finally:
        server.stop()


@asynccontextmanager
async def redis_client(server: RedisServer) -> AsyncIterator[Redis]:
    client = Redis.from_url(server.url)
    try:
        yield client
    finally:
        await client.aclose()
