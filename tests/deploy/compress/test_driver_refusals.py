"""What stands where the pipeline wants to write, models it cannot read, and full disks."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
from pathlib import Path

import pytest
from tiny_models import (
    edit_json,
    job_for,
    recipe_data,
    write_calibration_text,
    write_llama,
)
from validate_setup import write_text

from taut_deploy import files
from taut_deploy.checkpoint import read_manifest, verify
from taut_deploy.compress import driver
from taut_deploy.errors import ModelError, OutputError
from taut_deploy.files import VOLATILE_FILES


def job(room: Path, output: Path, **quantize):
    return job_for(room / "model", recipe_data(room / "text.txt", **quantize), output)


def test_a_finished_checkpoint_is_returned_untouched(room, tmp_path):
    first = driver.compress(job(room, tmp_path / "out"))
    before = {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in (tmp_path / "out").iterdir()}
    assert driver.compress(job(room, tmp_path / "out")) == first
    after = {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in (tmp_path / "out").iterdir()}
    assert after == before


def test_another_recipe_into_the_same_output_is_refused(room, tmp_path):
    driver.compress(job(room, tmp_path / "out"))
    before = verify(tmp_path / "out")
    with pytest.raises(OutputError, match="holds a checkpoint of model by recipe 'tiny'"):
        driver.compress(job(room, tmp_path / "out", symmetric=False))
    assert verify(tmp_path / "out") == before


def test_another_calibration_text_under_the_same_name_is_refused(tmp_path):
    model = write_llama(tmp_path / "m", layers=1)
    text = write_calibration_text(tmp_path / "t.txt")
    driver.compress(job_for(model, recipe_data(text), tmp_path / "out"))
    write_text(text, 400, seed=6)
    with pytest.raises(OutputError, match="holds a checkpoint"):
        driver.compress(job_for(model, recipe_data(text), tmp_path / "out"))


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_an_output_that_is_not_ours_is_refused_and_left_alone(kind, room, tmp_path):
    output = tmp_path / "out"
    if kind == "file":
        output.write_text("precious")
    else:
        output.mkdir()
        (output / "thesis.txt").write_text("precious")
    with pytest.raises(OutputError, match="exists and is not a taut checkpoint"):
        driver.compress(job(room, output))
    kept = output if kind == "file" else output / "thesis.txt"
    assert kept.read_text() == "precious"


def test_an_empty_output_directory_is_taken(room, tmp_path):
    (tmp_path / "out").mkdir()
    driver.compress(job(room, tmp_path / "out"))
    verify(tmp_path / "out")


def test_a_partial_directory_that_is_not_ours_is_refused_and_left_alone(room, tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "thesis.txt").write_text("precious")
    with pytest.raises(OutputError, match=r"\.out\.partial: exists and was not made by taut"):
        driver.compress(job(room, tmp_path / "out"))
    assert (tmp_path / ".out.partial" / "thesis.txt").read_text() == "precious"


def test_an_output_below_a_file_is_refused(room, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="a part of the path is a file"):
        driver.compress(job(room, tmp_path / "file" / "out"))


def test_two_at_once_into_one_output_are_refused(room, tmp_path):
    from filelock import FileLock

    with (
        FileLock(tmp_path / ".out.lock"),
        pytest.raises(OutputError, match="another 'taut compress' is writing it"),
    ):
        driver.compress(job(room, tmp_path / "out"))


def test_what_another_process_finished_meanwhile_is_taken(room, tmp_path, monkeypatch):
    """It was absent at the first look and is there once the lock is ours."""
    request, real, looks = job(room, tmp_path / "out"), driver.finished_checkpoint, []

    def look(asked):
        looks.append(real(asked))
        if len(looks) == 1:
            monkeypatch.undo()
            driver.compress(request)
            monkeypatch.setattr(driver, "finished_checkpoint", look)
            return None
        return looks[-1]

    monkeypatch.setattr(driver, "finished_checkpoint", look)
    assert driver.compress(request) == read_manifest(tmp_path / "out")
    assert looks[0] is None
    assert len(looks) == 2


def tree(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("nth", [1, 4, 9, 13])
def test_a_full_disk_is_one_line_and_leaves_no_half_file(nth, room, tmp_path, monkeypatch):
    """The n-th write breaks off half way with ENOSPC; once there is room again the run goes on."""
    calls = 0
    real = files.fsync_path

    def write_half(path: Path) -> None:
        nonlocal calls
        calls += path.name.endswith(".tmp")
        if calls == nth and path.name.endswith(".tmp"):
            os.truncate(path, path.stat().st_size // 2)
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path)

    monkeypatch.setattr(files, "fsync_path", write_half)
    with pytest.raises(OutputError, match=r"^cannot write .*: the disk is full"):
        driver.compress(job(room, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("*.tmp"))
    monkeypatch.setattr(files, "fsync_path", real)
    driver.compress(job(room, tmp_path / "out"))
    driver.compress(job(room, tmp_path / "undisturbed"))
    left, right = tree(tmp_path / "out"), tree(tmp_path / "undisturbed")
    for volatile in VOLATILE_FILES:
        left.pop(volatile)
        right.pop(volatile)
    assert left == right


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 120 kB; only root may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("cannot mount a tmpfs here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_is_really_full_and_then_has_room(small_disk, room, tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "require_free_space", lambda *_: None)
    with pytest.raises(OutputError, match=r"^cannot write .*: the disk is full"):
        driver.compress(job(room, small_disk / "out"))
    assert sorted(path.name for path in small_disk.iterdir()) == [".out.lock", ".out.partial"]
    assert not list(small_disk.rglob("*.tmp"))
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    driver.compress(job(room, small_disk / "out"))
    assert verify(small_disk / "out") == driver.compress(job(room, tmp_path / "undisturbed"))


def test_too_little_space_is_refused_before_any_work(room, tmp_path, monkeypatch):
    usage = files.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(OutputError, match=r"needs about .* MB but the disk has 0 MB free"):
        driver.compress(job(room, tmp_path / "out"))
    assert not (tmp_path / ".out.partial").exists()


def test_a_missing_shard_is_named(room, tmp_path):
    model = write_llama(tmp_path / "m", shard_bytes=100_000)
    shards = sorted(model.glob("model-*.safetensors"))
    assert len(shards) > 1
    request = job_for(model, recipe_data(room / "text.txt"), tmp_path / "out")
    shards[1].unlink()
    with pytest.raises(ModelError, match=shards[1].name):
        driver.compress(request)


def test_a_truncated_shard_is_named(room, tmp_path):
    model = write_llama(tmp_path / "m")
    request = job_for(model, recipe_data(room / "text.txt"), tmp_path / "out")
    shard = model / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"m/model\.safetensors: cannot be read as safetensors"):
        driver.compress(request)
    assert not (tmp_path / "out").exists()


def test_shapes_that_contradict_the_configuration_are_named(room, tmp_path):
    model = write_llama(tmp_path / "m")
    edit_json(model / "config.json", intermediate_size=96)
    with pytest.raises(ModelError, match=r"layers\.0.*mlp.*stored shape"):
        driver.compress(job_for(model, recipe_data(room / "text.txt"), tmp_path / "out"))


def test_a_model_that_is_quantised_already_is_refused(room, tmp_path):
    driver.compress(job(room, tmp_path / "first"))
    with pytest.raises(
        ModelError, match=r"quantised already \(compressed-tensors/pack-quantized\)"
    ):
        driver.compress(
            job_for(tmp_path / "first", recipe_data(room / "text.txt"), tmp_path / "out")
        )


def test_no_resume_starts_over(room, tmp_path, monkeypatch):
    request = job(room, tmp_path / "out")

    def stop_at_block_1(done, _total, what):
        if done == 1:
            raise KeyboardInterrupt(what)

    with pytest.raises(KeyboardInterrupt):
        driver.compress(request, stop_at_block_1)
    steps: list[str] = []
    driver.compress(
        dataclasses.replace(request, resume=False), lambda _done, _total, what: steps.append(what)
    )
    assert "compressing model.layers.0" in steps
    with pytest.raises(KeyboardInterrupt):
        driver.compress(dataclasses.replace(request, output=tmp_path / "b"), stop_at_block_1)
    resumed: list[str] = []
    driver.compress(
        dataclasses.replace(request, output=tmp_path / "b"),
        lambda _done, _total, what: resumed.append(what),
    )
    assert "compressing model.layers.0" not in resumed
    assert "compressing model.layers.1" in resumed
