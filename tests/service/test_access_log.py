"""The access log: valid JSON whatever the client sent, sampled, errors always."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from gateway_harness import Client, eventually, settings_for
from patience import within
from pydantic import ValidationError

from taut_service.call import ROUTES, Call
from taut_service.config.settings import AccessLogSettings, Settings
from taut_service.http.sse import Usage
from taut_service.watch import access_log
from taut_service.watch.access_log import AccessLog
from taut_service.watch.logs import JsonFormatter
from taut_service.watch.metrics import Metrics

ROUTE = Metrics().route("unknown", "completions")


def call_with(request_id: bytes = b"id-1", status: int = 200, **values: Any) -> Call:
    call = Call(ROUTES[0], request_id, ROUTE)
    call.answer.status = status
    for name, value in values.items():
        parts = (call.admitted, call.routed, call.answer)
        setattr(next((part for part in parts if hasattr(part, name)), call), name, value)
    return call


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def test_a_line_holds_what_happened_and_nulls_for_what_did_not() -> None:
    stream = io.StringIO()
    log = AccessLog(stream)
    full = call_with(
        model="m", variant="w4a16", worker="w0", caller="someone", tries=2, usage=Usage(5, 4)
    )
    log.request(full, 0.25, "0af7651916cd43dd8448eb211c80319c")
    log.request(call_with(status=0), 0.1)
    await log.close()
    first, second = lines(stream)
    assert first.pop("time") > 1.7e9
    assert first == {
        "id": "id-1",
        "route": "completions",
        "model": "m",
        "variant": "w4a16",
        "worker": "w0",
        "status": 200,
        "seconds": 0.25,
        "stream": False,
        "tries": 2,
        "caller": "someone",
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
    }
    assert second["status"] == 499
    assert second["model"] is second["worker"] is second["prompt_tokens"] is None
    assert "trace_id" not in second


@pytest.mark.parametrize("nasty", ['"', "\\", 'a","status":200,"x":"', "{}", "~" * 128])
async def test_an_id_cannot_break_a_line(nasty: str) -> None:
    stream = io.StringIO()
    log = AccessLog(stream)
    log.request(call_with(nasty.encode()), 0.1)
    await log.close()
    (line,) = lines(stream)
    assert (line["id"], line["status"]) == (nasty, 200)


async def test_a_share_of_the_good_is_kept_and_all_of_the_bad() -> None:
    stream = io.StringIO()
    log = AccessLog(stream, ratio=0.25)
    for i in range(4000):
        log.request(call_with(b"req-%d" % i), 0.1)
        if i < 50:
            log.request(call_with(b"bad-%d" % i, status=(0, 400, 429, 502)[i % 4]), 0.1)
    await log.close()
    found = lines(stream)
    assert sum(line["status"] != 200 for line in found) == 50
    kept = sum(line["status"] == 200 for line in found)
    # Binomial, n = 4000, p = 1/4: six standard deviations are 164.
    assert abs(kept - 1000) < 164


async def test_the_same_request_is_kept_or_dropped_everywhere() -> None:
    streams = [io.StringIO(), io.StringIO()]
    for stream in streams:
        log = AccessLog(stream, ratio=0.5)
        for i in range(100):
            log.request(call_with(b"req-%d" % i), 0.1)
        await log.close()
    one, other = ([line["id"] for line in lines(stream)] for stream in streams)
    assert one == other
    assert 0 < len(one) < 100


async def test_ratio_zero_keeps_errors_only() -> None:
    stream = io.StringIO()
    log = AccessLog(stream, ratio=0.0)
    log.request(call_with(b"a"), 0.1)
    log.request(call_with(b"b", status=500), 0.1)
    await log.close()
    assert [line["id"] for line in lines(stream)] == ["b"]


async def test_lines_are_written_together_soon_after() -> None:
    stream = io.StringIO()
    log = AccessLog(stream)
    for _ in range(3):
        log.request(call_with(), 0.1)
    assert stream.getvalue() == ""
    await asyncio.sleep(0.15)
    assert stream.getvalue().count("\n") == 3


class Broken(io.StringIO):
    def write(self, _: str) -> int:
        raise BrokenPipeError


async def test_a_reader_that_went_away_silences_the_log() -> None:
    log = AccessLog(Broken())
    log.request(call_with(), 0.1)
    await eventually(lambda: not log.enabled)
    log.request(call_with(), 0.1)
    await log.close()


async def test_a_stuck_reader_costs_lines_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(access_log, "MAX_WAITING", 100)
    monkeypatch.setattr(access_log, "CLOSE_TIMEOUT_S", 0.1)
    reading, writing = os.pipe()
    dropped: list[int] = []
    with os.fdopen(writing, "w") as stream:
        log = AccessLog(stream, on_dropped=dropped.append)
        longest = 0.0
        # A pipe holds 64 KiB, some 200 lines: more than that blocks the thread.
        for _ in range(20):
            for _ in range(50):
                log.request(call_with(b"x" * 100), 0.1)
            before = time.perf_counter()
            log.flush()
            longest = max(longest, time.perf_counter() - before)
            await asyncio.sleep(0.01)
        assert dropped
        assert longest < 0.1
        # Once somebody reads, it goes on.
        loop = asyncio.get_running_loop()
        text = b""
        while len(text.splitlines()) < 1000 - sum(dropped):
            text += await loop.run_in_executor(None, os.read, reading, 65536)
        log.request(call_with(b"last"), 0.1)
        await log.close()
        text += os.read(reading, 65536)
    os.close(reading)
    found = [json.loads(line) for line in text.splitlines()]
    assert found[-1]["id"] == "last"
    assert len(found) == 1001 - sum(dropped)


async def test_a_stuck_reader_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "CLOSE_TIMEOUT_S", 0.1)
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        log = AccessLog(stream)
        for _ in range(1000):
            log.request(call_with(b"x" * 100), 0.1)
        await within(2, log.close())
        os.close(reading)


async def test_a_process_whose_output_nobody_reads_serves_on_and_ends_well(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    settings = settings_for("http://127.0.0.1:1")
    file.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "taut_service", "--config", str(file), "--port", "0"),
        stdout=writing,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    os.close(writing)
    assert process.stderr is not None
    line = json.loads(await process.stderr.readline())
    port = int(line["message"].rsplit(":", 1)[1])
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    async with asyncio.timeout(30):
        # Some 300 bytes a line: four times what the pipe holds.
        for _ in range(800):
            await client.send("POST", "/v1/completions", b"{}")
            assert (await client.answer()).status == 400
    client.close()
    process.terminate()
    async with asyncio.timeout(10):
        _, stderr = await process.communicate()
    os.close(reading)
    assert process.returncode == 0, stderr.decode()
    assert b"Traceback" not in stderr
    assert b"Fatal" not in stderr


def test_a_switch_is_short_for_the_section() -> None:
    model = {"name": "m", "max_model_len": 1, "workers": [{"name": "w", "url": "http://h:1"}]}
    for value, expected in (
        (True, AccessLogSettings()),
        (False, AccessLogSettings(enabled=False)),
        ({"ratio": 0.5}, AccessLogSettings(ratio=0.5)),
    ):
        settings = Settings.model_validate({"models": [model], "access_log": value})
        assert settings.access_log == expected
        assert Settings.model_validate(settings.model_dump(mode="json")) == settings
    for wrong in ({"ratio": 2}, {"ratio": -0.1}, "yes", {"unknown": 1}):
        with pytest.raises(ValidationError):
            Settings.model_validate({"models": [model], "access_log": wrong})


def test_a_traceback_of_the_process_log_is_in_its_one_line() -> None:
    try:
        raise ZeroDivisionError("a defect")
    except ZeroDivisionError:
        given = ("taut_service.x", logging.ERROR, __file__, 1, "%s ended", ("it",), sys.exc_info())
        line = JsonFormatter().format(logging.LogRecord(*given))
    assert "\n" not in line
    told = json.loads(line)
    assert (told["level"], told["message"]) == ("error", "it ended")
    assert told["exception"].endswith("ZeroDivisionError: a defect")
