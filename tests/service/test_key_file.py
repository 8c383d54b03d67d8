"""API keys from a file: its shapes, its mistakes, and how a change takes effect."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from gateway_harness import eventually, settings_for

from taut_service.admit.auth import ApiKeys
from taut_service.admit.key_file import MAX_FILE_BYTES, KeyFileWatch, read_keys
from taut_service.config.settings import SettingsError
from taut_service.errors import UnauthorizedError


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_file_has_two_shapes(tmp_path: Path) -> None:
    listed = tmp_path / "list.yml"
    listed.write_text(f"- {{name: a, sha256: {sha256('k')}, tokens_per_minute: 9}}\n")
    mapped = tmp_path / "map.yaml"
    mapped.write_text("api_keys:\n" + listed.read_text())
    assert read_keys(listed) == read_keys(mapped)
    assert read_keys(listed)[0].tokens_per_minute == 9
    lines = tmp_path / "api-keys"
    lines.write_text(f"# who\n\na {sha256('k')}  # the first\nb\t{sha256('l')}\n")
    assert [key.name for key in read_keys(lines)] == ["a", "b"]
    for empty in (tmp_path / "empty.yaml", tmp_path / "empty"):
        empty.write_text("# nobody\n")
        assert read_keys(empty) == ()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("keys", "only-a-secret\n", "keys:1: expected 'NAME SHA256'"),
        ("keys", "a b c\n", "keys:1: expected 'NAME SHA256'"),
        ("keys", "a plain-secret\n", "[0].sha256: "),
        ("keys.yaml", "{keys: []}", "expected a list of keys"),
        ("keys.yaml", "[{name: a, name: b}]", "the key 'name' is given twice"),
        ("keys.yaml", "[", "keys.yaml:1:2: "),
    ],
)
def test_unusable_file_is_one_line_and_shows_no_secret(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(SettingsError) as refused:
        read_keys(file)
    assert message in str(refused.value)
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_of_no_sensible_size_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with file.open("wb") as stream:
        stream.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(SettingsError, match=f"^{file}: larger than {MAX_FILE_BYTES} bytes$"):
        read_keys(file)


@asynccontextmanager
async def watched(path: Path) -> AsyncIterator[tuple[ApiKeys, list[bool]]]:
    keys = ApiKeys(settings_for("http://h:1", api_keys_file=str(path)))
    counted: list[bool] = []
    watch = KeyFileWatch(lambda: keys.file, keys.replace_file_keys, counted.append, 0.01)
    task = watch.start()
    try:
        await eventually(lambda: watch._seen is not None)
        yield keys, counted
    finally:
        task.cancel()
        await asyncio.wait([task])


def knows(keys: ApiKeys, key: str) -> bool:
    try:
        return keys.caller_of([b"Bearer " + key.encode()]) is not None
    except UnauthorizedError:
        return False


async def test_changed_file_is_in_force_by_itself(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"a {sha256('old')}\n")
    async with watched(file) as (keys, counted):
        assert knows(keys, "old")
        file.write_text(f"a {sha256('new')}\n")
        await eventually(lambda: knows(keys, "new"))
        assert not knows(keys, "old")
        assert counted == [True]


async def test_swapped_link_of_a_kubernetes_secret_is_seen(tmp_path: Path) -> None:
    """Kubelet: the file links to ..data/keys, ..data to a dated directory; an update swaps it."""
    for version in ("old", "new"):
        (tmp_path / f"..{version}").mkdir()
        (tmp_path / f"..{version}" / "keys").write_text(f"a {sha256(version)}\n")
        # Same size and time: only the inode tells them apart.
        os.utime(tmp_path / f"..{version}" / "keys", ns=(0, 0))
    (tmp_path / "..data").symlink_to("..old")
    (tmp_path / "keys").symlink_to("..data/keys")
    async with watched(tmp_path / "keys") as (keys, counted):
        assert knows(keys, "old")
        (tmp_path / "..data_tmp").symlink_to("..new")
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")
        await eventually(lambda: knows(keys, "new"))
        assert counted == [True]


async def test_bad_change_is_refused_once_and_the_old_keys_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"a {sha256('old')}\n")
    async with watched(file) as (keys, counted):
        with caplog.at_level(logging.ERROR):
            file.write_text("a not-a-hash\n")
            await eventually(lambda: counted == [False])
            await asyncio.sleep(0.1)
        assert len(caplog.records) == 1
        assert "the API keys in force stay" in caplog.text
        assert counted == [False]
        assert knows(keys, "old")
        file.unlink()
        await eventually(lambda: counted == [False, False])
        assert knows(keys, "old")
        file.write_text(f"a {sha256('new')}\n")
        await eventually(lambda: knows(keys, "new"))


async def test_touched_file_is_no_change(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"a {sha256('old')}\n")
    async with watched(file) as (keys, counted):
        await asyncio.sleep(0.05)
        os.utime(file)
        await asyncio.sleep(0.05)
        assert knows(keys, "old")
        assert counted == []
