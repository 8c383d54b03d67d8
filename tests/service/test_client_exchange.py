"""The shortcuts round ASGI: same bytes, same ends, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest
from gateway_harness import CHAT, COMPLETION, eventually, gateway, settings_for
from mock_engine import Faults, MockEngine

from taut_service.built import how_built
from taut_service.http.client_exchange import ClientExchange

BODY = json.dumps(COMPLETION).encode()


def request(body: bytes = BODY, version: str = "1.1", **headers: str) -> bytes:
    fields = {"host": "t", "content-length": str(len(body)), **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"POST /v1/completions HTTP/{version}\r\n{lines}\r\n".encode() + body


async def test_answer_has_one_date_and_a_length() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        client = await harness.connect()
        client.writer.write(request())
        head = (await client.reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200 ok\r\n")
        for name in (b"date:", b"content-length:", b"x-request-id:", b"x-taut-worker:"):
            assert head.count(b"\r\n" + name) == 1
        assert b"transfer-encoding" not in head
        client.close()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with (
        MockEngine(Faults(latency_s=0.02)) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        client = await harness.connect()
        ids = [f"id-{i}" for i in range(5)]
        client.writer.write(b"".join(request(x_request_id=name) for name in ids))
        answers = [await client.answer() for _ in ids]
        assert [answer.headers["x-request-id"] for answer in answers] == ids
        assert {answer.status for answer in answers} == {200}
        client.close()


async def test_client_that_leaves_with_requests_in_the_pipe_ends_the_running_one() -> None:
    async with (
        MockEngine(Faults(latency_s=5)) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        client = await harness.connect()
        client.writer.write(request() * 3)
        await eventually(lambda: engine.running == 1)
        client.close()
        await eventually(lambda: engine.aborted == 1)
        await eventually(lambda: harness.app.drain.live == 0)
        assert engine.started == 1


@pytest.mark.parametrize(("version", "headers"), [("1.0", {}), ("1.1", {"connection": "close"})])
async def test_connection_is_closed_when_the_client_wants_that(
    version: str, headers: dict[str, str]
) -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        client = await harness.connect()
        client.writer.write(request(version=version, **headers))
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.reader.read() == b""


async def test_body_in_pieces_after_100_continue() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        client = await harness.connect()
        whole = request(expect="100-continue")
        client.writer.write(whole[: -len(BODY)])
        assert (await client.head()).status == 100
        for i in range(0, len(BODY), 10):
            client.writer.write(BODY[i : i + 10])
            await asyncio.sleep(0.001)
        assert (await client.answer()).status == 200
        assert engine.seen[0].body == BODY
        client.close()


async def test_body_that_came_at_once_is_still_bounded() -> None:
    limits = {"max_body_bytes": 40}
    async with MockEngine() as engine, gateway(settings_for(engine.url, limits=limits)) as harness:
        assert (await harness.post(COMPLETION)).status == 413
        assert engine.seen == []


async def test_answers_to_a_client_that_does_not_read_wait_for_it() -> None:
    # 40 answers of 0.5 MB: more than any socket buffer holds.
    faults = Faults(tokens=1, token="t" * 500_000)
    async with MockEngine(faults) as engine, gateway(settings_for(engine.url)) as harness:
        client = await harness.connect()
        client.writer.write(request() * 40)
        await asyncio.sleep(0.5)
        assert engine.completed < 40
        for _ in range(40):
            answer = await client.answer()
            assert len(answer.json["choices"][0]["text"]) == 500_000
        client.close()


async def test_request_leaves_no_garbage_for_the_collector() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        client = await harness.connect()

        async def ask(times: int) -> None:
            wrong = {"model": "unknown"}
            for body in [COMPLETION, {**COMPLETION, "stream": True}, CHAT, wrong] * times:
                path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
                await client.send("POST", path, json.dumps(body).encode())
                await client.answer()
            engine.seen.clear()

        await ask(2)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await ask(20)
            gc.collect()
            left = len(gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        client.close()
        # The prober's and the loop's own; 80 requests would leave thousands.
        assert left < 60


async def test_without_the_shortcuts_asgi_does() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        for stream in (False, True):
            answer = await plain_asgi(harness.app, {**COMPLETION, "stream": stream})
            assert answer[0]["status"] == 200
            assert b"tok" in b"".join(message.get("body", b"") for message in answer[1:])


async def test_disconnect_is_noticed_without_the_shortcuts() -> None:
    async with (
        MockEngine(Faults(latency_s=5)) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        task = asyncio.create_task(plain_asgi(harness.app, COMPLETION, leave_after_s=0.1))
        await eventually(lambda: engine.aborted == 1)
        assert await task == []


async def plain_asgi(
    app: Any, document: dict[str, Any], leave_after_s: float | None = None
) -> list[dict[str, Any]]:
    """Call the application as another server would."""
    body = json.dumps(document).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"host", b"t"), (b"content-length", b"%d" % len(body))],
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.sleep(60 if leave_after_s is None else leave_after_s)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


async def test_the_shortcuts_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hang on a method of uvicorn's: a new version could lose them without a word."""
    if how_built() == "compiled":
        pytest.skip("replaces compiled methods: test_compiled.py runs it on Python")
    taken: list[str] = []
    for name in ("take_body", "watch", "respond"):
        original = getattr(ClientExchange, name)

        def spy(self: Any, *args: Any, name: str = name, original: Any = original) -> Any:
            taken.append(name)
            return original(self, *args)

        monkeypatch.setattr(ClientExchange, name, spy)
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        assert (await harness.post(COMPLETION)).status == 200
        assert taken == ["take_body", "watch", "respond"]
        taken.clear()
        assert (await harness.post({"model": "unknown"})).status == 404
        assert taken == ["take_body", "watch", "respond"]


@pytest.mark.parametrize(
    "header", [b"x-a: b\nset-cookie: c", b"x-a: b\rset-cookie: c", b"x-a: b\x00", b"x-a: b\r\n c"]
)
async def test_worker_cannot_write_lines_into_the_head(header: bytes) -> None:
    raw = b"HTTP/1.1 200 OK\r\n" + header + b"\r\ncontent-length: 2\r\n\r\n{}"
    async with (
        MockEngine(Faults(raw=raw)) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        answer = await harness.post(COMPLETION)
        assert (answer.status, answer.error["code"]) == (502, "worker_lost")
        assert "set-cookie" not in answer.headers
