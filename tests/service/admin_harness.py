"""A gateway whose admin API listens on a port of its own, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway_harness import Answer, Harness, eventually, gateway

from taut_service.config.settings import Settings
from taut_service.http.server import AdminServer, listen


class Admin:
    """Sends requests to the admin port of a gateway."""

    def __init__(self, harness: Harness, port: int) -> None:
        self.harness = harness
        self.port = port
        self._there = Harness(harness.app, port, harness.server, harness.log)

    async def ask(
        self, method: str, path: str, body: Any = b"", headers: dict[str, str] | None = None
    ) -> Answer:
        fields = {"host": "127.0.0.1", **(headers or {})}
        if body != b"":
            fields["content-type"] = "application/json"
        return await self._there.request(method, path, body, fields)

    async def state(self) -> Any:
        answer = await self.ask("GET", "/admin/state")
        assert answer.status == 200, answer.body
        return answer.json


@asynccontextmanager
async def administered(settings: Settings, path: Path | None = None) -> AsyncIterator[Admin]:
    async with gateway(settings, path=path) as harness:
        assert harness.app.admin is not None
        opened = listen("127.0.0.1", 0)
        server = AdminServer(harness.app.admin)
        task = asyncio.create_task(server.serve([opened]))
        await eventually(lambda: server.started)
        try:
            yield Admin(harness, opened.getsockname()[1])
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
