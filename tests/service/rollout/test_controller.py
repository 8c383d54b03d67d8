"""Rollouts when something is taken away: the journal, a variant, the lead, or themselves."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from admin_harness import Admin, administered
from gateway_harness import eventually
from mock_reader import ReadingEngine
from redis_process import RedisServer, redis_server, require_redis
from rollout_calls import at_half, do, report, send, stands
from rollout_settings import settings_of

from taut_service.config.settings import RolloutRedis
from taut_service.rollout.audit import Entry, write_line
from taut_service.rollout.file_journal import FileJournal
from taut_service.rollout.redis_journal import RedisJournal
from taut_service.rollout.shares import why_not_there
from taut_service.rollout.state import Rollout

STATE = Rollout("m", "small", "base", "1", "running", 0.0, 0.0, "")


@asynccontextmanager
async def kept_in(folder: Path) -> AsyncIterator[Admin]:
    """A gateway with two variants, whose rollouts are kept in a folder."""
    async with (
        ReadingEngine() as base,
        ReadingEngine() as small,
        administered(settings_of(base, small, {"directory": str(folder)})) as admin,
    ):
        yield admin


async def journal_is(admin: Admin, up: bool) -> bool:
    return await admin.harness.metric("taut_rollout_journal_up") == up


async def waits_for(admin: Admin, why: str) -> bool:
    return bool((await report(admin))["next"] == why)


async def test_a_gateway_starts_without_its_journal_and_decides_once_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    require_redis()
    server = RedisServer(tmp_path)
    try:
        async with ReadingEngine() as base, ReadingEngine() as small:
            settings = settings_of(base, small, {"store": "redis", "redis": {"url": server.url}})
            with caplog.at_level(logging.INFO, "taut_service.rollout.controller"):
                async with administered(settings) as admin:
                    assert await journal_is(admin, up=False)
                    await server.start()
                    await eventually(lambda: journal_is(admin, up=True))
                    assert (await do(admin, "start", candidate="small"))[0] == 200
    finally:
        server.stop()
    lost, back, *_ = (record.message for record in caplog.records)
    assert lost.startswith("rollout: the journal is lost, nothing is decided: Redis: ")
    assert back == "rollout: the journal is back"


async def test_a_command_that_others_are_always_faster_than_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def faster(*_: object) -> bool:
        return False

    monkeypatch.setattr(FileJournal, "append", faster)
    async with kept_in(tmp_path) as admin:
        status, refused = await do(admin, "start", candidate="small")
        assert (status, refused["error"]["code"]) == (409, "contended")
        assert (await report(admin))["phase"] == "none"


async def test_evidence_that_is_none_ends_no_watch_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with kept_in(tmp_path) as admin:
        await do(admin, "start", candidate="small")
        with monkeypatch.context() as patch:
            add_counts = FileJournal.add_counts

            async def wrong(journal: FileJournal, key: str, counts: Any) -> dict[str, int]:
                return {**await add_counts(journal, key, counts), "chat|kl": 1}

            patch.setattr(FileJournal, "add_counts", wrong)
            await eventually(lambda: journal_is(admin, up=False))
        assert "the evidence about 'small' of 'm' holds what is no count of it" in caplog.text
        await eventually(lambda: journal_is(admin, up=True))


async def test_a_log_that_is_removed_stops_the_rollout_and_the_command_says_so(
    tmp_path: Path,
) -> None:
    async with kept_in(tmp_path) as admin:
        await do(admin, "start", candidate="small")
        away = (tmp_path / "audit.jsonl").rename(tmp_path / "away")
        await eventually(lambda: journal_is(admin, up=False))
        status, refused = await do(admin, "hold")
        assert (status, refused["error"]["code"]) == (503, "journal_lost")
        assert "audit.jsonl: No such file" in refused["error"]["message"]
        assert (await admin.ask("GET", "/admin/rollout/history")).status == 503
        away.replace(tmp_path / "audit.jsonl")
        await eventually(lambda: journal_is(admin, up=True))
        assert (await do(admin, "hold"))[0] == 200


async def test_a_candidate_that_has_all_traffic_does_not_lose_it_by_a_second_start(
    tmp_path: Path,
) -> None:
    async with kept_in(tmp_path) as admin:
        await do(admin, "start", candidate="small")
        for _ in range(3):
            await send(admin, 20)
            await asyncio.sleep(0.3)
        await eventually(lambda: stands(admin, "complete"), 10)
        status, refused = await do(admin, "start", candidate="small")
        assert (status, refused["error"]["code"]) == (409, "rollout_complete")
        assert (await report(admin))["weights"] == {"base": 0, "small": 1}
        assert (await do(admin, "start", candidate="small", force=True))[0] == 200
        assert (await report(admin))["percent"] == 0


async def test_what_another_gateway_decided_first_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds the rollout while this one is about to promote it."""
    append = FileJournal.append

    async def late(journal: FileJournal, entry: Entry) -> bool:
        last = journal.entries[-1] if journal.entries else None
        if entry.event != "promoted" or last is None:
            return await append(journal, entry)
        state = dataclasses.replace(last.state, phase="held", why="lunch", since=time.time())
        await append(journal, write_line(last, "held", "another", state, {}))
        return False

    monkeypatch.setattr(FileJournal, "append", late)
    async with kept_in(tmp_path) as admin:
        await do(admin, "start", candidate="small")
        await send(admin, 20)
        await eventually(lambda: stands(admin, "held"), 10)
        found = await report(admin)
        assert (found["percent"], found["why"]) == (0, "lunch")
        assert found["weights"] == {"base": 1, "small": 0}
        assert await journal_is(admin, up=True)
    assert caplog.text.count("rollout: another gateway has decided") == 1


async def test_a_variant_that_a_reload_takes_away_is_named_and_goes_on_when_it_is_back(
    tmp_path: Path,
) -> None:
    file = tmp_path / "gateway.yaml"
    async with ReadingEngine() as base, ReadingEngine() as small:
        settings = settings_of(base, small, {"directory": str(tmp_path / "rollout")})
        async with administered(settings, path=file) as admin:
            await do(admin, "start", candidate="small")
            percent = 'taut_rollout_percent{model="m",variant="small"}'
            assert await admin.harness.metric(percent) == 0
            renamed = settings.model_dump(mode="json")
            renamed["models"][0]["variants"][1]["name"] = "next"
            file.write_text(json.dumps(renamed))
            await admin.harness.app.reloader.reload()
            gone = "the configuration has no variant 'small' of 'm' any more"
            await eventually(lambda: waits_for(admin, gone))
            shown = (await admin.harness.request("GET", "/metrics")).body.decode()
            assert "taut_rollout_percent{" not in shown and "taut_rollout_phase{" not in shown
            swapped = settings.model_dump(mode="json")
            swapped["models"][0]["baseline"] = "small"
            file.write_text(json.dumps(swapped))
            await admin.harness.app.reloader.reload()
            other = "the baseline of 'm' is another one now"
            await eventually(lambda: waits_for(admin, other))
            file.write_text(json.dumps(settings.model_dump(mode="json")))
            await admin.harness.app.reloader.reload()
            await send(admin, 20)
            await eventually(lambda: at_half(admin), 10)


def test_a_model_that_is_gone_is_named() -> None:
    assert why_not_there(STATE, None) == "the configuration has no model 'm' any more"
    model: Any = SimpleNamespace(
        variants={"base": 1, "small": 1}, settings=SimpleNamespace(baseline="base")
    )
    assert why_not_there(STATE, model) == ""


async def test_a_defect_that_ends_the_watch_is_told_by_metric_and_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("taut_service.rollout.controller.decide", broken)
    async with kept_in(tmp_path) as admin:
        await do(admin, "start", candidate="small")
        await eventually(lambda: journal_is(admin, up=False))
    (record,) = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert record.message == "rollout: nothing is decided any more"
    assert record.exc_info is not None and "a defect" in str(record.exc_info[1])


async def test_lines_that_are_read_for_several_at_once_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The history asks for new lines while the watch does."""
    read = RedisJournal._ask

    async def slow(journal: RedisJournal, call: Any) -> Any:
        found = await read(journal, call)
        await asyncio.sleep(0.02)
        return found

    async with (
        redis_server(tmp_path) as server,
        ReadingEngine() as base,
        ReadingEngine() as small,
    ):
        other = RedisJournal(RolloutRedis(url=server.url))
        shared = {"store": "redis", "redis": {"url": server.url}}
        async with administered(settings_of(base, small, shared)) as admin:
            await do(admin, "start", candidate="small")
            await other.refresh()
            monkeypatch.setattr(RedisJournal, "_ask", slow)
            held = dataclasses.replace(other.entries[-1].state, phase="held")
            await other.append(write_line(other.entries[-1], "held", "another", held, {}))
            answers = await asyncio.gather(
                *(admin.ask("GET", "/admin/rollout/history") for _ in range(5))
            )
            assert {(answer.status, answer.json.get("lines")) for answer in answers} == {(200, 2)}
            assert (await do(admin, "rollback"))[0] == 200
        await other.close()
