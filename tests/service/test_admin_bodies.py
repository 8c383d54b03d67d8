"""Bodies of the admin API are bounded before anything is made of them, keys or not."""

from __future__ import annotations

import asyncio

import pytest
from admin_harness import Admin, administered
from gateway_harness import Client, settings_for
from mock_engine import MockEngine
from patience import within

from taut_service.config.settings import Settings
from taut_service.http import small_bodies

WEIGHTS = "/admin/models/m/weights"
GOOD = b'{"weights": {"default": 2}}'


def settings(engine: MockEngine, **sections: object) -> Settings:
    return settings_for(engine.url, golden=False, admin={"port": 0}, **sections)


async def chunked(admin: Admin, pieces: int, size: int) -> Client:
    """Begin a body that does not announce its length; send pieces of spaces."""
    client = Client(*await asyncio.open_connection("127.0.0.1", admin.port))
    head = f"PUT {WEIGHTS} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    client.writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
    for _ in range(pieces):
        client.writer.write(b"%x\r\n%b\r\n" % (size, b" " * size))
        await client.writer.drain()
    return client


@pytest.mark.parametrize("keys", [False, True])
async def test_large_bodies_are_refused(keys: bool) -> None:
    api_keys = [{"name": "a", "sha256": "0" * 64, "scopes": ["admin"]}] if keys else []
    async with MockEngine() as engine, administered(settings(engine, api_keys=api_keys)) as admin:
        announced = await admin.ask("PUT", WEIGHTS, b" " * (small_bodies.MAX_BYTES + 1))
        assert (announced.status, announced.error["code"]) == (413, "request_too_large")
        client = await chunked(admin, 20, 16 * 1024)
        # Not all of it has been sent, nor will be.
        answer = await within(5, client.answer())
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        client.close()


async def test_body_within_the_bound_is_read() -> None:
    async with MockEngine() as engine, administered(settings(engine)) as admin:
        body = GOOD + b" " * (small_bodies.MAX_BYTES - len(GOOD))
        answer = await admin.ask("PUT", WEIGHTS, body)
        assert (answer.status, answer.json) == (200, {"weights": {"default": 2.0}})
        assert (await admin.state())["generation"] == 1


async def test_slow_body_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_bodies, "ARRIVAL_S", 0.2)
    async with MockEngine() as engine, administered(settings(engine)) as admin:
        client = await chunked(admin, 1, 10)
        answer = await within(5, client.answer())
        assert (answer.status, answer.error["code"]) == (408, "body_timeout")
        client.close()


async def test_compressed_body_is_refused_by_name() -> None:
    async with MockEngine() as engine, administered(settings(engine)) as admin:
        answer = await admin.ask("PUT", WEIGHTS, GOOD, {"content-encoding": "gzip"})
        assert (answer.status, answer.error["code"]) == (415, "unsupported_encoding")
        assert "'gzip'" in answer.error["message"]
        assert answer.headers["accept-encoding"] == "identity"
