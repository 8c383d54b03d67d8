"""A cache directory: warm, cold, read-only, absent, full; a worker starts in every case."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import write_llama

from taut_deploy.cache import CachePlace, open_cache, place
from taut_deploy.worker import WorkerSpec, launch

KEY = "cpu-0123456789abcdef"
NOBODY = 65534


@pytest.fixture
def own(tmp_path):
    """Where the worker's artefacts would be without the volume."""
    return {"VLLM_CACHE_ROOT": str(tmp_path / "own" / "vllm")}


def fill(root: Path, mark: bool = True) -> Path:
    """A directory as a worker leaves it."""
    directory = root / KEY
    artefact = directory / "vllm" / "torch_compile_cache" / "a.so"
    artefact.parent.mkdir(parents=True)
    artefact.write_bytes(b"code")
    if mark:
        (directory / place.MARKER).write_text('{"cold_s": 12.5}')
    return directory


@pytest.fixture
def read_only(monkeypatch, tmp_path):
    """Writing under the volume fails as on a volume mounted read-only."""
    real = place.tempfile.TemporaryFile

    def refuse(*, dir: Path) -> object:
        if Path(dir).is_relative_to(tmp_path / "volume"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(dir=dir)

    monkeypatch.setattr(place.tempfile, "TemporaryFile", refuse)


def test_empty_directory_is_cold_and_used(tmp_path, own):
    found = open_cache(tmp_path / "volume", KEY, own)
    directory = tmp_path / "volume" / KEY
    assert (found.state, found.directory) == ("cold", directory)
    assert "cold" in found.message
    assert found.environment["VLLM_CACHE_ROOT"] == str(directory / "vllm")
    assert set(found.environment) == set(place.VARIABLES)
    assert all(Path(path).is_dir() for path in found.environment.values())
    assert not (directory / place.MARKER).exists(), "only 'taut cache warm' marks"


def test_marked_directory_is_warm_and_used_in_place(tmp_path, own):
    directory = fill(tmp_path / "volume")
    found = open_cache(tmp_path / "volume", KEY, own)
    assert (found.state, found.directory) == ("warm", directory)
    assert found.message == f"compile cache {directory}: warm"
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff"])
def test_a_marker_that_is_none_is_not_believed(content, tmp_path, own):
    directory = fill(tmp_path / "volume", mark=False)
    (directory / place.MARKER).write_text(content, encoding="latin-1")
    assert open_cache(tmp_path / "volume", KEY, own).state == "cold"


def test_another_keys_directory_is_not_used(tmp_path, own):
    fill(tmp_path / "volume")
    found = open_cache(tmp_path / "volume", "cpu-ffffffffffffffff", own)
    assert (found.state, found.directory) == ("cold", tmp_path / "volume" / "cpu-ffffffffffffffff")


def test_relative_volume_becomes_absolute(tmp_path, own, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = open_cache(Path("volume"), KEY, own)
    assert all(Path(path).is_absolute() for path in found.environment.values())


def test_read_only_warm_directory_is_copied_to_where_vllm_would_write(tmp_path, own, read_only):
    directory = fill(tmp_path / "volume")
    found = open_cache(tmp_path / "volume", KEY, own)
    copy = tmp_path / "own" / "vllm" / "taut" / KEY
    assert (found.state, found.directory) == ("warm", copy)
    assert f"{directory}: warm; read-only file system, so its copy {copy} is used" in found.message
    artefact = copy / "vllm" / "torch_compile_cache" / "a.so"
    assert artefact.read_bytes() == b"code"
    artefact.write_bytes(b"kept")
    assert open_cache(tmp_path / "volume", KEY, own).directory == copy
    assert artefact.read_bytes() == b"kept", "copied once"
    assert [path.name for path in copy.parent.iterdir()] == [KEY]


def test_copy_goes_below_the_home_directory_where_nothing_is_set(tmp_path, read_only, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    fill(tmp_path / "volume")
    found = open_cache(tmp_path / "volume", KEY, {})
    assert found.directory == tmp_path / "home" / ".cache" / "vllm" / "taut" / KEY


def test_mounted_noexec_is_not_used_in_place(tmp_path, own, monkeypatch):
    fill(tmp_path / "volume")
    flags = SimpleNamespace(f_flag=os.ST_NOEXEC)
    monkeypatch.setattr(place.os, "statvfs", lambda _: flags)
    found = open_cache(tmp_path / "volume", KEY, own)
    assert found.directory == tmp_path / "own" / "vllm" / "taut" / KEY
    assert "mounted noexec" in found.message


def test_read_only_and_cold_is_not_used(tmp_path, own, read_only):
    fill(tmp_path / "volume", mark=False)
    found = open_cache(tmp_path / "volume", KEY, own)
    assert (found.state, found.directory, found.environment) == ("unused", None, {})
    assert "not used (read-only file system)" in found.message


def test_no_room_for_a_copy_leaves_nothing_and_the_worker_starts(
    tmp_path, own, read_only, monkeypatch
):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fill(tmp_path / "volume")
    monkeypatch.setattr(place.shutil, "copyfile", full)
    found = open_cache(tmp_path / "volume", KEY, own)
    assert (found.state, found.environment) == ("unused", {})
    assert "No space left" in found.message
    assert list((tmp_path / "own" / "vllm" / "taut").iterdir()) == []


def test_a_file_in_place_of_the_volume_is_said(tmp_path, own):
    (tmp_path / "volume").write_text("")
    found = open_cache(tmp_path / "volume", KEY, own)
    assert (found.state, found.environment) == ("unused", {})
    assert "not a directory" in found.message


def test_workers_that_copy_at_once_share_one_whole_copy(tmp_path, own, read_only):
    directory = fill(tmp_path / "volume")
    for number in range(50):
        (directory / "vllm" / f"{number}.so").write_bytes(bytes(1000))
    found: list[CachePlace] = []
    together = threading.Barrier(4)

    def start() -> None:
        together.wait()
        found.append(open_cache(tmp_path / "volume", KEY, own))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (copy,) = {one.directory for one in found}
    assert {one.state for one in found} == {"warm"}
    assert copy is not None
    assert len(list((copy / "vllm").glob("*.so"))) == 50
    assert [path.name for path in copy.parent.iterdir()] == [KEY], "no half copy is left"


def as_nobody(directory: Path, root: Path, own: Path) -> CachePlace:
    """Open a cache in a child without rights, which root would not notice otherwise."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.chdir(directory)
            if os.geteuid() == 0:
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            answer = open_cache(root, KEY, {"VLLM_CACHE_ROOT": str(own)})
            os.write(write, pickle.dumps(answer))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answered = pipe.read()
    os.waitpid(child, 0)
    found: CachePlace = pickle.loads(answered)
    return found


def test_volume_of_another_user_is_copied_into_folders_that_can_be_written(tmp_path):
    volume = fill(tmp_path / "volume").parent
    own = tmp_path / "own"
    own.mkdir(mode=0o777)
    own.chmod(0o777)
    for folder, _, files in os.walk(volume):
        for name in files:
            (Path(folder) / name).chmod(0o444)
        Path(folder).chmod(0o555)
    # pytest's own folders are closed to others.
    opened = [
        path
        for path in tmp_path.parents
        if path.stat().st_mode & 0o7 == 0 and path.stat().st_uid == os.geteuid()
    ]
    modes = {path: path.stat().st_mode for path in [tmp_path, *opened]}
    try:
        for path in modes:
            path.chmod(0o755)
        found = as_nobody(tmp_path, volume, own)
        assert (found.state, found.directory) == ("warm", own / "taut" / KEY), found.message
        assert "permission denied" in found.message
        for folder, _, _ in os.walk(own / "taut" / KEY):
            assert Path(folder).stat().st_mode & 0o700 == 0o700
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


def started_with(monkeypatch, spec: WorkerSpec) -> dict[str, str]:
    """The environment that vLLM would get."""
    seen: list[dict[str, str]] = []
    monkeypatch.setenv("TAUT_KERNELS", "prefer")
    monkeypatch.setattr(launch.os, "execve", lambda _program, _argv, given: seen.append(given))
    launch.exec_worker(spec)
    return seen[0]


def test_worker_tells_vllm_and_the_log(tmp_path, monkeypatch, capfd):
    model = write_llama(tmp_path / "m", layers=1)
    environment = started_with(monkeypatch, WorkerSpec(model, cache=tmp_path / "volume"))
    root = Path(environment["VLLM_CACHE_ROOT"]).parent
    assert root.parent == tmp_path / "volume"
    assert environment["TRITON_CACHE_DIR"] == str(root / "triton")
    assert environment["TAUT_LOAD_COMPILED"] == "1"
    assert f"taut: compile cache {root}: cold" in capfd.readouterr().err


def test_worker_starts_as_ever_where_the_volume_is_of_no_use(tmp_path, monkeypatch, capfd):
    model = write_llama(tmp_path / "m", layers=1)
    (tmp_path / "volume").write_text("")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/kept")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    environment = started_with(monkeypatch, WorkerSpec(model, cache=tmp_path / "volume"))
    assert environment["VLLM_CACHE_ROOT"] == "/kept"
    assert "TRITON_CACHE_DIR" not in environment
    assert "not used (not a directory)" in capfd.readouterr().err


def test_worker_without_the_option_says_and_changes_nothing(tmp_path, monkeypatch, capfd):
    model = write_llama(tmp_path / "m", layers=1)
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/kept")
    environment = started_with(monkeypatch, WorkerSpec(model))
    assert environment["VLLM_CACHE_ROOT"] == "/kept"
    assert "TAUT_LOAD_COMPILED" not in environment, "another machine may have filled it"
    assert "compile cache" not in capfd.readouterr().err
