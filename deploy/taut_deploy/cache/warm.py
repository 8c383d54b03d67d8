"""Fill a cache directory before traffic comes: start a worker, let it answer, stop it, mark it."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from taut_deploy.cache.key import CacheKey, cache_key_of
from taut_deploy.cache.place import MARKER, VARIABLES, read_marker, why_not_writable
from taut_deploy.checkpoint import Golden, Manifest, is_checkpoint, read_manifest
from taut_deploy.errors import OutputError, WorkerError
from taut_deploy.files import disk_errors_named, write_json_atomically
from taut_deploy.ports import free_port
from taut_deploy.progress import Say
from taut_deploy.serve.one_worker import ask_one_worker
from taut_deploy.serve.process import ChildSpec
from taut_deploy.tune import measure_for_worker
from taut_deploy.worker import LOOPBACK, WorkerSpec, command_for, installed_platform, worker_command
from taut_deploy.worker.arguments import with_asked_cache
from taut_deploy.worker.command import kernel_mode

LOG = "worker.log"
_NAME = "warm"
_GRACE_S = 60.0
_TUNE_BUDGET_S = 90.0
_TUNE_TILES = 2


@dataclass(frozen=True)
class WarmCache:
    """A warm directory.

    Args:
        key: its key.
        directory: where it lies.
        already: it was warm before; nothing was started.
        cold_s: seconds from the worker's start to its correct token with an empty directory; None
            where an interrupted run had left something in it.
        warm_s: the same for a second start out of the full directory; None if not measured.
        bytes: size of its files.
    """

    key: str
    directory: Path
    already: bool
    cold_s: float | None
    warm_s: float | None
    bytes: int


def key_for(spec: WorkerSpec) -> CacheKey:
    """The key that ``taut worker`` will use for ``spec`` on this machine.

    Raises:
        TautError: the checkpoint cannot be read, or the worker could not be started as asked.
    """
    return _key_and_manifest(spec)[0]


def warm(spec: WorkerSpec, root: Path, timeout_s: float, measure: bool, say: Say) -> WarmCache:
    """Make ``root/KEY`` warm, unless it is; one at a time for each key.

    Products of the model that nobody measured on this card are measured first.

    Args:
        spec: the worker as it will be started; address, name and drain do not matter.
        root: the volume.
        timeout_s: longest wait for the worker's first correct token, and for another process
            that warms the same key.
        measure: start the worker a second time and note how long that took.
        say: prints one line for the user.

    Raises:
        OutputError: ``root`` cannot be written.
        WorkerError: the worker ended, answered wrongly or not in time; no marker is left.
    """
    # The worker may be started from elsewhere.
    root = root.absolute()
    spec = replace(spec, cache=root)
    _measure(spec, say)
    key, manifest = _key_and_manifest(spec)
    directory = root / str(key)
    if (found := _already(directory)) is not None:
        return found
    if (refusal := why_not_writable(directory)) is not None:
        raise OutputError(f"{directory}: cannot be written ({refusal}); use another --cache")
    with _only_one(root, str(key), timeout_s):
        if (found := _already(directory)) is not None:
            return found
        golden = None if manifest is None else manifest.golden
        fresh = _size_of(directory) == 0
        say(f"starting a worker to fill {directory}; its log: {directory / LOG}")
        first_s = _run(_start_and_ask(spec, golden, root, directory, timeout_s, say))
        second_s = None
        if measure:
            say(f"first correct token after {first_s:.1f} s; once more, out of what is there now")
            second_s = _run(_start_and_ask(spec, golden, root, directory, timeout_s, say))
        made = WarmCache(
            str(key), directory, False, first_s if fresh else None, second_s, _size_of(directory)
        )
        _mark(made, key)
        return made


def _measure(spec: WorkerSpec, say: Say) -> None:
    """Measure what the worker's kernels are chosen by: it is part of the key."""
    platform = installed_platform()
    mode = kernel_mode(spec, _manifest(spec), platform)
    measure_for_worker(spec, mode, platform, _TUNE_BUDGET_S, _TUNE_TILES, say)


def _manifest(spec: WorkerSpec) -> Manifest | None:
    return read_manifest(spec.checkpoint) if is_checkpoint(spec.checkpoint) else None


def _key_and_manifest(spec: WorkerSpec) -> tuple[CacheKey, Manifest | None]:
    manifest = _manifest(spec)
    platform = installed_platform()
    spec, _ = with_asked_cache(spec, manifest, platform)
    command = command_for(spec, manifest, platform)
    environment = {**os.environ, **command.environment}
    return cache_key_of(spec.checkpoint, platform, command.argv, environment), manifest


def _already(directory: Path) -> WarmCache | None:
    marker = read_marker(directory)
    if marker is None:
        return None
    return WarmCache(
        directory.name,
        directory,
        True,
        marker.get("cold_s"),
        marker.get("warm_s"),
        _size_of(directory),
    )


@contextlib.contextmanager
def _only_one(root: Path, key: str, timeout_s: float) -> Iterator[None]:
    path = root / f".{key}.lock"
    lock = FileLock(path, timeout=timeout_s)
    try:
        with disk_errors_named(path):
            lock.acquire()
    except Timeout as error:
        raise WorkerError(
            f"{path}: held for {timeout_s:.0f} s by another process that warms this key"
        ) from error
    except NotImplementedError as error:
        raise OutputError(f"{path}: this file system has no locks; use another --cache") from error
    try:
        yield
    finally:
        lock.release()


def _run(work: Coroutine[Any, Any, float]) -> float:
    """Run to the end; SIGTERM cancels, as asyncio lets SIGINT do where it is not ignored.

    An exception out of a handler could come between a child's start and its being known, which
    would leave the child behind.

    Raises:
        KeyboardInterrupt: a signal came.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        return asyncio.run(_cancelled_by_sigterm(work))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        if _in_main_thread():
            signal.signal(signal.SIGTERM, before)


async def _cancelled_by_sigterm(work: Coroutine[Any, Any, float]) -> float:
    task = asyncio.current_task()
    if task is not None and _in_main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


def _in_main_thread() -> bool:
    """Say whether Python lets this thread set signal handlers."""
    return threading.current_thread() is threading.main_thread()


async def _start_and_ask(
    spec: WorkerSpec,
    golden: Golden | None,
    root: Path,
    directory: Path,
    timeout_s: float,
    say: Say,
) -> float:
    """Seconds from the worker's start to its first correct token; the worker is stopped then.

    Raises:
        WorkerError: it ended, answered wrongly or not in time.
    """
    port = free_port()
    child = ChildSpec(
        "worker", _command(spec, root, port), {"PYTHONSAFEPATH": "1"}, directory / LOG, _GRACE_S
    )
    started = time.monotonic()
    return await ask_one_worker(
        child,
        f"http://{LOOPBACK}:{port}",
        _NAME,
        golden,
        lambda: time.monotonic() - started,
        timeout_s=timeout_s,
        say=say,
    )


def _command(spec: WorkerSpec, root: Path, port: int) -> tuple[str, ...]:
    # What could be measured was: more would be another key.
    child = replace(spec, name=_NAME, port=port, cache=root, shutdown_timeout_s=5, tune_budget_s=0)
    return worker_command(child)


def _mark(made: WarmCache, key: CacheKey) -> None:
    # The worker itself says where it wrote; an empty directory would mean that it had another key.
    if not any((made.directory / "vllm").iterdir()):
        raise WorkerError(
            f"{made.directory}: the worker wrote nothing here; {LOG} in it says what it used"
        )
    write_json_atomically(
        made.directory / MARKER,
        {
            "key": made.key,
            "parts": asdict(key),
            "cold_s": made.cold_s,
            "warm_s": made.warm_s,
            "bytes": made.bytes,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )


def _size_of(directory: Path) -> int:
    """Bytes of the compiled artefacts."""
    folders = (directory / name for name in VARIABLES.values())
    found = (path for folder in folders for path in folder.rglob("*"))
    return sum(path.stat().st_size for path in found if path.is_file())
