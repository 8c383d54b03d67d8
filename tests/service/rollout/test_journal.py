"""What rollouts remember: the chain of hashes, a folder, and a Redis that gateways share."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis_process import redis_server

from taut_service.config.settings import RolloutRedis, RolloutSettings, SettingsError
from taut_service.rollout.audit import TamperedError, check_line, check_lines, write_line
from taut_service.rollout.file_journal import AUDIT, EVIDENCE, FileJournal
from taut_service.rollout.journal import Journal, JournalLostError, build_journal
from taut_service.rollout.redis_journal import RedisJournal
from taut_service.rollout.state import Rollout, rollout_of

STATE = Rollout("m", "small", "base", "id1", "running", 10.0, 1_700_000_000.0, "stärted", 5, 50)


async def write(journal: Journal, event: str, state: Rollout = STATE) -> bool:
    last = journal.entries[-1] if journal.entries else None
    return await journal.append(write_line(last, event, "me", state, {"answers": 5}))


def test_a_line_reads_back_and_no_other_follows() -> None:
    first = write_line(None, "started", "me", STATE, {})
    second = write_line(first, "held", "you", STATE, {"x": 1})
    read = check_lines([first.line, second.line], "log")
    assert [(e.seq, e.event, e.state) for e in read] == [(1, "started", STATE), (2, "held", STATE)]
    assert first.document["time"] == "2023-11-14T22:13:20.000+00:00"
    with pytest.raises(TamperedError, match="log: line 1: has the number 2"):
        check_line(None, second.line, "log")
    other = write_line(None, "started", "somebody else", STATE, {})
    with pytest.raises(TamperedError, match="line 2: does not follow"):
        check_line(other, second.line, "log")
    with pytest.raises(TamperedError, match="line 1: was changed"):
        check_line(None, first.line.replace('"me"', '"he"'), "log")


@pytest.mark.parametrize("line", ["", "{}", "[1]", '{"hash": 1}', "{" * 5000])
def test_what_is_no_line_is_named(line: str) -> None:
    with pytest.raises(TamperedError, match=r"log: line 1: is no line"):
        check_line(None, line, "log")


@pytest.mark.parametrize(
    ("document", "error"),
    [
        ({"model": "m"}, "is no state of a rollout"),
        ({**STATE.as_json(), "of_later": 1}, "is no state of a rollout"),
        ([STATE.as_json()], "is no state of a rollout"),
        ({**STATE.as_json(), "phase": "paused"}, "has the unknown phase 'paused'"),
    ],
)
def test_a_state_that_this_version_does_not_know_is_no_line(document: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        rollout_of(document)


def test_a_whole_line_of_an_unknown_phase_is_refused_by_its_number() -> None:
    later: Any = dataclasses.replace(STATE, phase="paused")  # type: ignore[arg-type]
    line = write_line(None, "paused", "me", later, {}).line
    with pytest.raises(TamperedError, match="log: line 1: is no line"):
        check_line(None, line, "log")


async def test_a_folder_keeps_lines_and_evidence(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "new" / "folder")
    assert await write(journal, "started")
    assert await journal.add_counts("id1|x", {"answers": 2, "chat|kl|3": 1}) == {
        "answers": 2,
        "chat|kl|3": 1,
    }
    await journal.add_counts("id1|x", {"answers": 1})
    await journal.forget("id1|x", ["chat|kl|3"])
    await journal.close()
    again = FileJournal(tmp_path / "new" / "folder")
    assert [entry.state for entry in again.entries] == [STATE]
    assert await again.add_counts("id1|x", {}) == {"answers": 3}
    assert await again.add_counts("id2|x", {}) == {}
    await again.close()


async def test_a_second_gateway_is_refused_and_told_the_way_out(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    with pytest.raises(SettingsError, match=r"another gateway uses it; .*'store: redis'"):
        FileJournal(tmp_path)
    await journal.close()
    await FileJournal(tmp_path).close()


async def test_a_line_that_was_never_finished_is_cut_off(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    await write(journal, "started")
    await journal.close()
    with (tmp_path / AUDIT).open("a") as file:
        file.write('{"seq":2,"event":"pro')
    again = FileJournal(tmp_path)
    assert len(again.entries) == 1
    await write(again, "held")
    await again.close()
    last = FileJournal(tmp_path)
    assert [entry.event for entry in last.entries] == ["started", "held"]
    await last.close()


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Let no file grow beyond this, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_of_a_line_that_did_not_fit_on_the_disk_nothing_is_left(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    await write(journal, "started")
    file = tmp_path / AUDIT
    size = file.stat().st_size
    with files_end_at(size + 20), pytest.raises(JournalLostError, match=r"audit\.jsonl: File too"):
        await write(journal, "held")
    assert (file.stat().st_size, len(journal.entries)) == (size, 1)
    await write(journal, "promoted")
    await journal.close()
    again = FileJournal(tmp_path)
    assert [entry.event for entry in again.entries] == ["started", "promoted"]
    await again.close()


async def test_a_line_that_the_disk_did_not_keep_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    journal = FileJournal(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("taut_service.rollout.file_journal.os.fsync", broken)
        with pytest.raises(JournalLostError, match=r"audit\.jsonl: Input/output error"):
            await write(journal, "started")
    assert (tmp_path / AUDIT).read_bytes() == b""
    await journal.close()


async def test_evidence_that_could_not_be_saved_is_said_and_saved_the_next_time(
    tmp_path: Path,
) -> None:
    journal = FileJournal(tmp_path)
    await journal.add_counts("id1|x", {"answers": 2})
    in_the_way = tmp_path / "evidence.new"
    in_the_way.mkdir()
    with pytest.raises(JournalLostError, match=r"evidence\.json: Is a directory"):
        await journal.refresh()
    in_the_way.rmdir()
    await journal.close()
    assert json.loads((tmp_path / EVIDENCE).read_text()) == {"id1|x": {"answers": 2}}


def test_a_folder_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "rollout"
    with pytest.raises(SettingsError, match=rf"rollout\.directory: {folder}: Not a directory"):
        FileJournal(folder)
    (tmp_path / AUDIT).mkdir()
    with pytest.raises(SettingsError, match=rf"rollout\.directory: {tmp_path}/{AUDIT}: Is a dir"):
        FileJournal(tmp_path)


def test_a_shared_journal_without_the_package_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = RolloutSettings.model_validate({"store": "redis", "redis": {"url": "redis://h"}})
    monkeypatch.delitem(sys.modules, "taut_service.rollout.redis_journal")
    for name in [name for name in sys.modules if name.partition(".")[0] == "redis"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        SettingsError, match=r"the Python package redis: pip install 'taut\[redis\]'"
    ):
        build_journal(settings)


async def test_a_tampered_log_is_refused_at_the_start(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    for event in ("started", "held"):
        await write(journal, event)
    await journal.close()
    file = tmp_path / AUDIT
    file.write_text(file.read_text().replace('"held"', '"hold"'))
    with pytest.raises(SettingsError, match=r"audit\.jsonl: line 2: was changed.*move the file"):
        FileJournal(tmp_path)
    file.write_bytes(file.read_bytes().replace(b"hold", b"h\xe4ld"))
    with pytest.raises(SettingsError, match="line 2: is no line"):
        FileJournal(tmp_path)


@pytest.mark.parametrize(
    "text",
    ['{"a": 1}', '{"a": {"chat|kl": 1}}', '{"a": {"chat|kl|x": 1}}', '{"a": {"answers": 1e999}}'],
)
async def test_unreadable_evidence_begins_anew_and_is_said(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / EVIDENCE).write_text(text)
    journal = FileJournal(tmp_path)
    assert "evidence begins anew" in caplog.text
    assert await journal.add_counts("a", {}) == {}
    await journal.close()


async def test_a_log_that_is_taken_away_while_it_is_written_is_missed(tmp_path: Path) -> None:
    """Lines would go on into a file that nobody finds at the next start."""
    journal, file = FileJournal(tmp_path), tmp_path / AUDIT
    await write(journal, "started")
    await write(journal, "held")
    await journal.refresh()
    away = file.rename(tmp_path / "away")
    with pytest.raises(JournalLostError, match=r"audit\.jsonl: No such file"):
        await journal.refresh()
    file.write_bytes(away.read_bytes())
    with file.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(JournalLostError, match=r"audit\.jsonl: Resource temporarily"):
            await journal.refresh()
    await journal.refresh()  # a copy does as well
    assert await write(journal, "promoted")
    await journal.check()
    await journal.close()
    assert len(check_lines(file.read_text().splitlines(), "log")) == 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace('"held"', '"hold"'), "line 2 is another one since it was read"),
        (lambda text: text.splitlines(keepends=True)[0], "line 2 is gone since it was read"),
        (lambda text: text * 2, "somebody else writes it"),
    ],
)
async def test_a_log_that_is_changed_while_it_is_written_is_named(
    change: Callable[[str], str], told: str, tmp_path: Path
) -> None:
    journal, file = FileJournal(tmp_path), tmp_path / AUDIT
    await write(journal, "started")
    await write(journal, "held")
    right = file.read_text()
    file.write_text(change(right))
    for _ in range(2):
        with pytest.raises(JournalLostError, match=rf"audit\.jsonl: {told}"):
            await journal.refresh()
    file.write_text(right)
    await journal.refresh()
    await journal.close()


async def test_of_two_gateways_that_decide_at_once_one_wins(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server:
        settings = RolloutRedis(url=server.url)
        one, two = RedisJournal(settings), RedisJournal(settings)
        await two.refresh()
        assert await write(one, "started")
        assert not await write(two, "started")
        assert two.entries == one.entries  # it has read what was decided
        assert await write(two, "held")
        await one.refresh()
        assert [entry.event for entry in one.entries] == ["started", "held"]
        await one.add_counts("id1|x", {"answers": 2, "chat|kl|3": 1})
        assert await two.add_counts("id1|x", {"answers": 1}) == {"answers": 3, "chat|kl|3": 1}
        await two.forget("id1|x", ["chat|kl|3"])
        assert await one.add_counts("id1|x", {}) == {"answers": 3}
        server.kill()
        with pytest.raises(JournalLostError, match="Redis: "):
            await one.refresh()
        for journal in (one, two):
            await journal.close()


async def test_a_tampered_list_in_redis_is_named(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server:
        journal = RedisJournal(RolloutRedis(url=server.url))
        await write(journal, "started")
        forged = json.loads(journal.entries[0].line)
        forged["seq"] = 2
        await journal._client.rpush("taut:rollout:audit", json.dumps(forged))
        with pytest.raises(JournalLostError, match="taut:rollout:audit: line 2: does not follow"):
            await journal.refresh()
        await journal.close()


async def test_a_list_in_redis_that_is_emptied_or_changed_is_named(tmp_path: Path) -> None:
    """A Redis that keeps nothing on disk is empty after its restart."""
    async with redis_server(tmp_path) as server:
        journal = RedisJournal(RolloutRedis(url=server.url))
        for event in ("started", "held", "promoted"):
            await write(journal, event)
        await journal.refresh()
        first = journal.entries[0].line
        await journal._client.lset("taut:rollout:audit", 0, first.replace('"me"', '"he"'))
        with pytest.raises(JournalLostError, match="taut:rollout:audit: line 1 is another one"):
            await journal.check()
        await journal._client.rpop("taut:rollout:audit")
        with pytest.raises(JournalLostError, match="line 3 is gone since it was read; put it back"):
            await journal.refresh()
        await journal._client.flushall()
        with pytest.raises(JournalLostError, match="line 3 is gone"):
            await journal.refresh()
        await journal._client.hset("taut:rollout:evidence:id1|x", "answers", "many")
        with pytest.raises(JournalLostError, match=r"evidence:id1\|x: holds what is no count"):
            await journal.add_counts("id1|x", {})
        await journal.close()
