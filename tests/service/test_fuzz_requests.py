"""Hypothesis against a gateway process: documents on the routes to workers, and raw bytes.

Three quarters of ``TAUT_FUZZ_CASES`` (default 1,000, 20,000 in full); counts are printed.
Whatever comes in: no 5xx of ours (the workers are healthy), no traceback in the log, nothing left
counted, and never a malformed request at a worker, whose strict reader writes each one down.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
from collections import Counter
from pathlib import Path

from fuzz_cases import fuzz_cases, posts, requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_processes import House, house, report
from raw_client import HOST

AT_ONCE = 25
PATIENCE_S = 0.3
"""For an answer to bytes that may be an unfinished request."""
ALLOWED = {200, 400, 401, 404, 405, 408, 411, 413, 415, 417, 431, 501, 505}
FUZZ = settings(
    deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


class Visitor:
    """One keep-alive connection, opened again when the gateway closes it.

    One that was idle for long, as on a machine that stood still, the gateway may close while a
    request is on its way: that one is sent once more, on a new connection, and must be answered.
    """

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection(HOST, port, timeout=60)
        self.statuses: Counter[int] = Counter()
        self.sent_again = 0

    def _ask(self, path: str, body: bytes) -> http.client.HTTPResponse:
        self.connection.request("POST", path, body, {"content-type": "application/json"})
        return self.connection.getresponse()

    def post(self, path: str, body: bytes) -> None:
        try:
            answer = self._ask(path, body)
        except ConnectionError:
            self.sent_again += 1
            self.connection.close()
            answer = self._ask(path, body)
        content = answer.read()
        self.statuses[answer.status] += 1
        assert answer.status in ALLOWED, (answer.status, path, body, content)
        assert answer.headers["x-request-id"]
        if answer.status >= 400:
            assert_error(path, json.loads(content))


def assert_error(path: str, document: object) -> None:
    """Errors have the shape of the API they belong to."""
    assert isinstance(document, dict)
    error = document["error"]
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    if path != "/v1/messages":
        assert set(error) == {"message", "type", "param", "code"}


async def still_whole(home: House) -> None:
    await home.quiet(20)
    assert home.gateway.running
    assert home.malformed() == []
    assert home.gateway.problems() == []


async def test_documents_near_valid_ones_get_an_answer_and_no_5xx(tmp_path: Path) -> None:
    count = fuzz_cases() // 4
    async with house(tmp_path, engines=2) as home:
        visitor = Visitor(home.port)

        @settings(FUZZ, max_examples=count)
        @given(case=posts())
        def search(case: tuple[str, bytes]) -> None:
            visitor.post(*case)

        await asyncio.to_thread(search)
        visitor.connection.close()
        report(f"fuzzed documents: {visitor.statuses.total()}, {dict(visitor.statuses)}")
        assert visitor.statuses[200] > count / 5
        assert visitor.statuses[400] > count / 20
        assert visitor.sent_again < count / 20
        await still_whole(home)


async def send(port: int, data: bytes) -> list[int]:
    """Send bytes; return the status of every answer, 0 for none."""
    reader, writer = await asyncio.open_connection(HOST, port)
    found = b""
    try:
        writer.write(data)
        with contextlib.suppress(TimeoutError, ConnectionError):
            while piece := await asyncio.wait_for(reader.read(65536), PATIENCE_S):
                found += piece
                if found.endswith((b"}", b"0\r\n\r\n")) and b"\r\n\r\n" in found:
                    break
    finally:
        writer.transport.abort()
    assert not found or found.startswith(b"HTTP/1.1 "), (data, found[:200])
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3}) ", found)] or [0]


async def test_bytes_near_a_valid_request_harm_nobody(tmp_path: Path) -> None:
    count = fuzz_cases() // 2 // AT_ONCE
    statuses: Counter[int] = Counter()
    async with house(tmp_path, engines=2) as home:
        loop = asyncio.get_running_loop()

        async def send_all(batch: list[bytes]) -> None:
            for data, found in zip(
                batch, await asyncio.gather(*(send(home.port, x) for x in batch)), strict=True
            ):
                statuses.update(found)
                assert set(found) <= {0, 100, *ALLOWED}, (found, data)

        @settings(FUZZ, max_examples=count)
        @given(batch=st.lists(requests(), min_size=AT_ONCE, max_size=AT_ONCE))
        def search(batch: list[bytes]) -> None:
            asyncio.run_coroutine_threadsafe(send_all(batch), loop).result(60)

        await asyncio.to_thread(search)
        report(f"fuzzed requests in bytes: {statuses.total()}, {dict(statuses)} (0: no answer)")
        assert statuses[200] > count
        assert statuses[400] > count
        await still_whole(home)
