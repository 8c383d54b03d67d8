"""``taut cache warm``: one worker, one correct token, one marker; and what leaves none."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_cache_key import write_model
from tiny_manifest import tiny_manifest
from tiny_models import write_llama

from taut_deploy.cache import place, warm
from taut_deploy.checkpoint import Golden, seal
from taut_deploy.errors import OutputError, WorkerError
from taut_deploy.worker import WorkerSpec, worker_command

pytestmark = pytest.mark.usefixtures("fixed_kernels")

FAKE = Path(__file__).parent / "fake_cache_worker.py"
TAUT = str(Path(sys.executable).with_name("taut"))


def seal_with_golden(model: Path) -> Path:
    seal(model, tiny_manifest(golden=Golden("The capital of France is", " Paris", 1, 1.0)))
    return model


class Room:
    """A checkpoint, a volume, and workers that behave as told."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spec = WorkerSpec(seal_with_golden(write_model(path / "m")))
        self.volume = path / "volume"
        self.started = path / "started"
        self.started.touch()
        self.said: list[str] = []
        self._monkeypatch = monkeypatch

    def behave(self, behaviour: str) -> None:
        def command(spec: WorkerSpec, root: Path, port: int) -> tuple[str, ...]:
            directory = root / str(warm.key_for(spec))
            words = (FAKE, port, directory, behaviour, self.started)
            return (sys.executable, *map(str, words))

        self._monkeypatch.setattr(warm, "_command", command)

    def warm(self, timeout_s: float = 60, measure: bool = False) -> warm.WarmCache:
        return warm.warm(self.spec, self.volume, timeout_s, measure, self.said.append)

    @property
    def workers(self) -> list[int]:
        """Process numbers of all workers started so far."""
        return [int(line) for line in self.started.read_text().split()]

    @property
    def markers(self) -> list[Path]:
        return list(self.volume.glob(f"*/{place.MARKER}"))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def room(tmp_path, monkeypatch):
    return Room(tmp_path, monkeypatch)


def test_one_correct_token_makes_a_directory_warm(room):
    room.behave("right")
    made = room.warm()
    assert made.directory == room.volume / made.key
    assert (made.already, made.warm_s) == (False, None)
    assert made.cold_s is not None
    assert made.cold_s > 0
    assert made.bytes >= 1000
    marker = json.loads((made.directory / place.MARKER).read_text())
    assert (marker["key"], marker["cold_s"]) == (made.key, made.cold_s)
    assert marker["parts"]["model"] == str(room.spec.checkpoint)
    assert [is_alive(pid) for pid in room.workers] == [False], "it was stopped"
    assert place.open_cache(room.volume, made.key, {}).state == "warm"


def test_second_call_starts_nothing(room):
    room.behave("right")
    first = room.warm()
    room.behave("dies")
    again = room.warm()
    assert again.already
    assert (again.key, again.cold_s) == (first.key, first.cold_s)
    assert len(room.workers) == 1


def test_measure_starts_twice_and_notes_both(room):
    room.behave("right")
    made = room.warm(measure=True)
    assert made.warm_s is not None
    assert len(room.workers) == 2
    assert room.warm().warm_s == made.warm_s


def test_two_at_once_start_one_worker(room):
    room.behave("right")
    made: list[warm.WarmCache] = []
    threads = [threading.Thread(target=lambda: made.append(room.warm())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.already for one in made) == [False, True]
    assert len(room.workers) == 1


@pytest.mark.parametrize(
    ("behaviour", "timeout_s", "message"),
    [
        ("dies", 60, "worker ended 1 times before it was ready: no such device"),
        ("wrong", 60, "answers 'The capital of France is' with ' Rome' instead of ' Paris'"),
        ("silent", 60, "with 0 tokens instead of 1"),
        ("idle", 60, "the worker wrote nothing here"),
        ("hangs", 2, "no answer within 2 s .*--timeout"),
        ("broken", 2, "no answer within 2 s"),
    ],
)
def test_worker_that_is_no_good_leaves_no_marker(room, behaviour, timeout_s, message):
    room.behave(behaviour)
    with pytest.raises(WorkerError, match=message):
        room.warm(timeout_s)
    assert room.markers == []
    assert not any(is_alive(pid) for pid in room.workers)
    room.behave("right")
    assert not room.warm().already


def test_start_after_an_interrupted_one_is_not_called_cold(room):
    room.behave("wrong")
    with pytest.raises(WorkerError):
        room.warm()
    room.behave("right")
    assert room.warm().cold_s is None


def test_what_only_the_log_holds_is_no_artefact(room):
    room.behave("dies")
    with pytest.raises(WorkerError):
        room.warm()
    room.behave("right")
    assert room.warm().cold_s is not None


def test_lock_of_another_process_is_waited_for_and_named(room, monkeypatch):
    room.behave("right")
    room.volume.mkdir()
    lock = room.volume / f".{warm.key_for(room.spec)}.lock"
    with warm.FileLock(lock), pytest.raises(WorkerError, match=rf"{lock.name}: held for 0 s"):
        room.warm(timeout_s=0.2)
    assert room.workers == []


def test_file_system_without_locks_is_said(room, monkeypatch):
    def refuse(self: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    room.behave("right")
    monkeypatch.setattr(warm.FileLock, "acquire", refuse)
    with pytest.raises(OutputError, match=r"\.lock: this file system has no locks"):
        room.warm()
    assert room.workers == []


def test_volume_that_cannot_be_written_is_refused_before_anything_starts(room):
    room.behave("right")
    room.volume.write_text("")
    with pytest.raises(
        OutputError, match=r"cannot be written \(not a directory\); use another --cache"
    ):
        room.warm()
    assert room.workers == []


DRIVER = """
import sys
from pathlib import Path
from taut_deploy import cli
from taut_deploy.cache import warm
fake, started, behaviour = sys.argv[1:4]
def command(spec, root, port):
    directory = root / str(warm.key_for(spec))
    return (sys.executable, fake, str(port), str(directory), behaviour, started)
warm._command = command
sys.argv = ["taut", "cache", "warm", *sys.argv[4:]]
sys.exit(cli.main())
"""


def wait_for(condition, what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("shell", "number"),
    [
        pytest.param("", signal.SIGINT, id="SIGINT"),
        pytest.param("", signal.SIGTERM, id="SIGTERM"),
        # As a shell without job control starts a background command.
        pytest.param('trap "" INT; ', signal.SIGTERM, id="SIGTERM-where-SIGINT-is-ignored"),
    ],
)
def test_interrupted_command_stops_its_worker_and_leaves_no_marker(room, shell, number):
    words = [FAKE, room.started, "hangs", room.spec.checkpoint, "--cache", room.volume]
    command = [sys.executable, "-c", DRIVER, *map(str, words)]
    process = subprocess.Popen(
        ["bash", "-c", f'{shell}exec "$@"', "bash", *command], stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: room.workers or process.poll() is not None, "no worker was started")
    process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1] == "taut: interrupted; run the same command again to go on"
    assert [is_alive(pid) for pid in room.workers] == [False]
    assert room.markers == []


def test_worker_is_started_as_asked(tmp_path):
    spec = WorkerSpec(tmp_path, kernels="off", fused_ops=True, kv_cache_gib=3)
    here = dataclasses.replace(
        spec, name="warm", port=17, cache=tmp_path / "v", shutdown_timeout_s=5, tune_budget_s=0
    )
    assert warm._command(spec, tmp_path / "v", 17) == worker_command(here)


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_vllm_itself_warms_a_directory(tmp_path):
    """The key the command waits for and the key the real worker uses are the same one."""
    # vLLM's CPU attention has no heads of 16.
    model = write_llama(tmp_path / "m", layers=1, hidden=256)
    command = [TAUT, "cache", "warm", str(model), "--cache", str(tmp_path / "volume"), "--json"]
    command += ["--timeout", "600", "--", "--max-num-seqs", "4", "--enforce-eager"]
    for already in (False, True):
        done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
        assert done.returncode == 0, done.stderr
        made = json.loads(done.stdout)
        assert made["already"] == already
    directory = Path(made["directory"])
    assert f"compile cache {directory}: cold" in (directory / warm.LOG).read_text()
    assert json.loads((directory / place.MARKER).read_text())["cold_s"] == made["cold_s"]
    assert list(directory.glob("vllm/*")), "vLLM kept something there"
