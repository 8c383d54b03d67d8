"""The webhook and its outbox: what is not delivered is counted and said, without the address."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from gateway_harness import eventually
from mock_reader import ReadingEngine
from rollout_settings import settings_of

from taut_service.rollout import outbox
from taut_service.rollout.audit import Entry, write_line
from taut_service.rollout.outbox import Outbox
from taut_service.rollout.state import Rollout
from taut_service.rollout.webhook import webhook

STATE = Rollout("m", "small", "base", "1", "running", 10.0, 1_700_000_000.0, "started")
LINE: Entry = write_line(None, "started", "me", STATE, {})
OK = b"HTTP/1.1 204 X\r\n\r\n"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "PAUSE_S", 0.001)


class Receiver:
    """Takes a request a connection and answers what it is told to."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.told: list[bytes] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST /secret "):
            self.told.append(await reader.readexactly(len(LINE.line)))
        writer.write(self.answer)
        writer.close()


@asynccontextmanager
async def receiver(answer: bytes) -> AsyncIterator[Receiver]:
    found = Receiver(answer)
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    found.url = f"http://127.0.0.1:{port}/secret"
    try:
        yield found
    finally:
        server.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "Not Found"),
        (b"HTTP/1.1 302 Found\r\nlocation: /login\r\ncontent-length: 0\r\n\r\n", "Found"),
        (b"HTTP/1.1 500 \r\ncontent-length: 0\r\n\r\n", "500"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH-2.0-OpenSSH_9.2"),
        (b"", "Remote end closed connection without response"),
    ],
    ids=["not found", "elsewhere", "no reason", "no HTTP", "silence"],
)
async def test_a_webhook_that_does_not_take_a_change_is_said_once_and_told_the_next(
    answer: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "taut_service.rollout.outbox"):
        async with receiver(answer) as there:
            hook = webhook(there.url)
            hook.start()
            for _ in range(2):
                hook.put(LINE)
            await eventually(lambda: hook.failures == 2)
            assert there.told == [LINE.line.encode()] * 2 * outbox.TRIES
            there.answer = OK
            hook.put(LINE)
            await hook.close()
            assert hook.failures == 2
    first, second = (record.message.strip() for record in caplog.records)
    assert first == f"rollout: the webhook is not told of changes: {words}"
    assert second == "rollout: the webhook is told again"
    assert "secret" not in caplog.text


async def test_a_webhook_that_is_gone_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async with receiver(OK) as there:
        hook = webhook(there.url)
    hook.start()
    hook.put(LINE)
    await hook.close()
    assert hook.failures == 1
    assert "the webhook is not told of changes: [Errno 111] Connection refused" in caplog.text


async def test_nothing_is_delivered_before_the_start_and_a_close_then_waits_for_nothing() -> None:
    told: list[int] = []

    async def deliver(item: int) -> None:
        told.append(item)

    waiting = Outbox("nobody", deliver)
    waiting.put(1)
    await waiting.close()
    waiting.start()
    waiting.put(2)
    await waiting.close()
    assert (told, waiting.failures) == ([2], 0)


async def test_beyond_what_may_wait_changes_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outbox, "WAITING", 2)
    told: list[int] = []

    async def deliver(item: int) -> None:
        told.append(item)

    full = Outbox("somebody", deliver)
    full.start()
    for item in range(4):
        full.put(item)
    assert full.failures == 2
    assert caplog.text.count("somebody is not told of changes: 2 wait already") == 1
    await full.close()
    assert told == [0, 1]


async def test_a_receiver_that_never_answers_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outbox, "CLOSE_S", 0.05)

    async def deliver(_: int) -> None:
        await asyncio.Event().wait()

    stuck = Outbox("somebody", deliver)
    stuck.start()
    stuck.put(1)
    async with asyncio.timeout(5):
        await stuck.close()
    assert "rollout: somebody was not told everything" in caplog.text


async def test_a_defect_that_ends_the_deliveries_is_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def deliver(_: int) -> None:
        raise ZeroDivisionError("a defect")

    broken = Outbox("somebody", deliver)
    broken.start()
    broken.put(1)
    await eventually(lambda: bool(caplog.records))
    await broken.close()
    (record,) = caplog.records
    assert (record.levelname, record.message) == (
        "CRITICAL",
        "rollout: somebody is told nothing any more",
    )
    assert record.exc_info is not None and "a defect" in str(record.exc_info[1])


@pytest.mark.parametrize(
    "url", ["https://h/a b", "https://h/é", "https://h/\n", "https://h:port/", "https://[::1/"]
)
async def test_an_address_that_nothing_can_be_sent_to_is_refused(url: str, tmp_path: Path) -> None:
    async with ReadingEngine() as base, ReadingEngine() as small:
        with pytest.raises(ValueError, match="must be of the form https://host/path"):
            settings_of(base, small, {"directory": str(tmp_path), "webhook": url})
