"""Hashes kept beside a checkpoint: when files are read again, and what is found all the same."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_checkpoint import checkpoint  # noqa: F401 - a fixture
from tiny_models import write_llama
from typer.testing import CliRunner

from taut_deploy import files, recorded_hashes
from taut_deploy.checkpoint import read_manifest, record_validation, seal, verify
from taut_deploy.cli import app
from taut_deploy.commands import worker as worker_command_module
from taut_deploy.errors import CheckpointError
from taut_deploy.models.store import RECORD_FILE, describe_directory
from taut_deploy.recorded_hashes import RECORD, RecordedHashes
from taut_deploy.worker import worker_command
from taut_deploy.worker.checks import verify_model

SHARD = "model-00002-of-00002.safetensors"
ALL = {"config.json", "model-00001-of-00002.safetensors", SHARD}


@pytest.fixture
def read(monkeypatch):
    """Names of the files whose bytes were hashed since."""
    names: list[str] = []
    real = recorded_hashes.sha256_open

    def noted(file):
        names.append(Path(file.name).name)
        return real(file)

    monkeypatch.setattr(recorded_hashes, "sha256_open", noted)
    return names


def flip(path: Path, *, same_mtime: bool = False) -> None:
    """One bit changes, the size does not."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    if same_mtime:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_sealed_checkpoint_is_not_read_again(checkpoint, read):  # noqa: F811
    verify(checkpoint)
    assert read == []
    verify(checkpoint, "full")
    assert set(read) == ALL


def test_several_files_are_hashed_at_once(checkpoint, monkeypatch):  # noqa: F811
    """Two readers meet in the middle of their files; alone, each would wait in vain."""
    meeting = threading.Barrier(2, timeout=30)
    real = recorded_hashes.sha256_open
    large = {"model-00001-of-00002.safetensors", SHARD}

    def met(file):
        if Path(file.name).name in large:
            meeting.wait()
        return real(file)

    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(recorded_hashes, "sha256_open", met)
    assert set(verify(checkpoint, "full").files) == ALL
    sealed = seal(checkpoint, read_manifest(checkpoint))
    assert sealed.files == {
        name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in ALL
    }


def test_the_first_of_several_altered_files_is_named(checkpoint):  # noqa: F811
    for name in ALL - {"config.json"}:
        flip(checkpoint / name)
    for _ in range(3):
        with pytest.raises(CheckpointError, match=r"model-00001-of-00002.*its sha256 differs"):
            verify(checkpoint, "full")


def test_the_record_holds_the_hash_of_each_file_and_is_readable_by_all(checkpoint):  # noqa: F811
    (checkpoint / RECORD).unlink()
    before = os.umask(0o077)
    try:
        verify(checkpoint)
    finally:
        os.umask(before)
    assert stat.S_IMODE((checkpoint / RECORD).stat().st_mode) == 0o644
    kept = json.loads((checkpoint / RECORD).read_text())["files"]
    assert {name: entry["sha256"] for name, entry in kept.items()} == {
        name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in ALL
    }


def test_a_verdict_does_not_make_the_record_void(checkpoint, read):  # noqa: F811
    record_validation(checkpoint, {"verdict": "PASS"})
    verify(checkpoint)
    assert read == []


def touch(path: Path) -> None:
    os.utime(path)


def make_anew(path: Path) -> None:
    """Another file of the same bytes and times of modification."""
    found = path.stat()
    shutil.copy2(path, path.with_name(".copy"))
    path.with_name(".copy").replace(path)
    assert path.stat().st_mtime_ns == found.st_mtime_ns


@pytest.mark.parametrize("change", [touch, make_anew])
def test_a_file_with_other_times_is_read_again_and_once(change, checkpoint, read):  # noqa: F811
    change(checkpoint / SHARD)
    verify(checkpoint)
    verify(checkpoint)
    assert read == [SHARD]


@pytest.mark.parametrize("same_mtime", [False, True])
def test_an_altered_file_is_refused_at_every_start(same_mtime, checkpoint):  # noqa: F811
    flip(checkpoint / SHARD, same_mtime=same_mtime)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"{re.escape(SHARD)}: its sha256 differs"):
            verify(checkpoint)


def test_a_file_that_is_cut_short_is_refused(checkpoint):  # noqa: F811
    os.truncate(checkpoint / SHARD, 100)
    with pytest.raises(CheckpointError, match=rf"{re.escape(SHARD)}: its sha256 differs"):
        verify(checkpoint)


def test_what_changes_below_the_file_system_only_a_full_reading_finds(checkpoint):  # noqa: F811
    flip(checkpoint / SHARD)
    found = (checkpoint / SHARD).stat()
    record = json.loads((checkpoint / RECORD).read_text())
    # As if the disk had changed the bit: no time says so.
    record["files"][SHARD] |= {"mtime_ns": found.st_mtime_ns, "ctime_ns": found.st_ctime_ns}
    (checkpoint / RECORD).write_text(json.dumps(record))
    verify(checkpoint)
    with pytest.raises(CheckpointError, match=rf"{re.escape(SHARD)}: its sha256 differs"):
        verify(checkpoint, "full")


def test_a_record_of_other_bytes_does_not_vouch_for_these(checkpoint):  # noqa: F811
    """Another manifest over the same files is compared with what the files are."""
    manifest = json.loads((checkpoint / "taut.json").read_text())
    manifest["files"][SHARD] = "0" * 64
    (checkpoint / "taut.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=rf"{re.escape(SHARD)}: its sha256 differs"):
        verify(checkpoint)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"format_version": 2, "files": {}}', "\xff" * 9, "[" * 999]
)
def test_a_damaged_record_is_made_anew(content, checkpoint, read):  # noqa: F811
    (checkpoint / RECORD).write_text(content)
    verify(checkpoint)
    assert set(read) == ALL
    verify(checkpoint)
    assert len(read) == len(ALL)


def test_a_copy_is_read_once_whatever_record_came_along(checkpoint, tmp_path, read):  # noqa: F811
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    verify(copy)
    assert set(read) == ALL
    verify(copy)
    assert len(read) == len(ALL)


def test_where_no_record_can_be_kept_each_start_says_so_once(
    checkpoint,  # noqa: F811
    monkeypatch,
    read,
):
    (checkpoint / RECORD).unlink()

    def refuse(path, *_):
        raise OSError(30, os.strerror(30), str(path))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    for _ in range(2):
        said: list[str] = []
        verify(checkpoint, say=said.append)
        assert len(said) == 1
        assert str(checkpoint) in said[0]
        assert "no record of that can be kept there (Read-only file system)" in said[0]
    assert sorted(read) == sorted([*ALL, *ALL])


def test_a_later_write_shows_even_within_a_tick_of_the_clock(checkpoint):  # noqa: F811
    for _ in range(20):
        seal(checkpoint, read_manifest(checkpoint))
        flip(checkpoint / SHARD)
        with pytest.raises(CheckpointError, match="its sha256 differs"):
            verify(checkpoint)


def test_of_a_file_that_is_written_meanwhile_nothing_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"1" * 100)
    real = recorded_hashes.sha256_open

    def appended(file):
        path.write_bytes(b"2" * 101)
        return real(file)

    monkeypatch.setattr(recorded_hashes, "sha256_open", appended)
    hashes = RecordedHashes(tmp_path)
    hashes.sha256("a")
    assert hashes.save() is None
    assert not (tmp_path / RECORD).exists()


def test_two_starters_at_once_leave_one_whole_record(checkpoint, monkeypatch):  # noqa: F811
    (checkpoint / RECORD).unlink()
    both = threading.Barrier(2, timeout=20)
    real = files.fsync_path

    def meet(path):
        # Both have written beside the record's place, and neither has renamed.
        if RECORD in path.name:
            both.wait()
        real(path)

    monkeypatch.setattr(files, "fsync_path", meet)
    failures: list[BaseException] = []

    def start() -> None:
        try:
            verify(checkpoint)
        except BaseException as error:
            failures.append(error)

    starters = [threading.Thread(target=start) for _ in range(2)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    assert failures == []
    assert set(json.loads((checkpoint / RECORD).read_text())["files"]) == ALL
    assert [path.name for path in checkpoint.iterdir() if path.suffix == ".tmp"] == []


KILLED = """
import os, sys, time
from pathlib import Path
from taut_deploy import files
from taut_deploy.checkpoint import verify
def hang(path):
    print("written", flush=True)
    time.sleep(60)
files.fsync_path = hang
verify(Path(sys.argv[1]))
"""


def test_a_starter_that_is_killed_leaves_no_half_record(checkpoint, read):  # noqa: F811
    (checkpoint / RECORD).unlink()
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(checkpoint)], stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "written\n"
        starter.kill()
    assert not (checkpoint / RECORD).exists()
    verify(checkpoint)
    assert set(read) == ALL
    assert (checkpoint / RECORD).is_file()


@pytest.mark.parametrize(
    ("file_system", "stable"),
    [("ext4 /dev/sda rw", True), ("nfs4 server:/x rw", True), ("fuse.s3fs s3fs rw", False)],
)
def test_inodes_count_where_they_outlive_a_mount(file_system, stable, tmp_path, monkeypatch):
    device = tmp_path.stat().st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    mounts = (
        f"1 2 0:99999 / /other rw - fuse x rw\n3 4 {numbers} / /m rw shared:1 - {file_system}\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: mounts)
    (tmp_path / "a").write_bytes(b"x")
    hashes = RecordedHashes(tmp_path)
    monkeypatch.undo()
    hashes.sha256("a")
    hashes.save()
    kept = json.loads((tmp_path / RECORD).read_text())["files"]["a"]["inode"]
    assert kept == ((tmp_path / "a").stat().st_ino if stable else None)


def test_a_model_of_the_store_is_read_once_and_its_altered_file_named(tmp_path, read):
    model = write_llama(tmp_path / "m", layers=1)
    record = describe_directory(model)
    (model / RECORD_FILE).write_text(json.dumps(record.as_json()))
    read.clear()
    verify_model(model)
    assert "model.safetensors" in read
    assert describe_directory(model).digest == record.digest  # the record is no file of the model
    read.clear()
    verify_model(model)
    assert read == []
    flip(model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: makes its files differ from"):
        verify_model(model)


def test_a_model_that_nobody_vouched_for_is_not_read_at_all(tmp_path, read):
    model = write_llama(tmp_path / "m", layers=1)
    assert verify_model(model) is None
    assert read == []
    assert not (model / RECORD).exists()


def test_the_command_verifies_once_for_later_starts(checkpoint, read):  # noqa: F811
    (checkpoint / RECORD).unlink()
    assert (
        "as taut.json says" in CliRunner().invoke(app, ["model", "verify", str(checkpoint)]).output
    )
    verify(checkpoint)
    assert len(read) == len(ALL)
    CliRunner().invoke(app, ["model", "verify", str(checkpoint), "--full"])
    assert len(read) == 2 * len(ALL)


@pytest.mark.parametrize("words", [["worker", "--verify", "full"], ["worker"]])
def test_a_worker_is_told_how_to_verify(words, tmp_path, monkeypatch):
    specs = []
    monkeypatch.setattr(worker_command_module, "exec_worker", specs.append)
    found = CliRunner().invoke(app, [words[0], str(tmp_path), *words[1:]])
    assert found.exit_code == 0, found.output
    assert specs[0].verification == ("full" if "full" in words else "recorded")
    line = worker_command(specs[0])
    assert line[line.index("--verify") + 1] == specs[0].verification


def test_a_large_file_costs_no_reading_the_second_time(checkpoint):  # noqa: F811
    """In seconds of this process; a sparse file is hashed like any other."""
    os.truncate(checkpoint / "config.json", 300 << 20)
    seal(checkpoint, read_manifest(checkpoint))
    seconds = []
    for verification in ("full", "recorded"):
        before = time.process_time()
        verify(checkpoint, verification)
        seconds.append(time.process_time() - before)
    assert seconds[1] < seconds[0] / 10
