"""Run the whole suite: what ``make test`` does without ARGS; with ``--all`` what CI does.

``--types`` adds mypy as a job: alone it would leave the other cores idle.

Two tracks take job after job, the longest first, each on its half of the cores, so that neither
waits for the other and a job with threads takes none from its neighbour. A job is a run of pytest:
the tests that build images, those that start real workers, then folders. A third track has the
tests that mostly wait, for helm or for a gateway. A track that has none of its own left takes the
others' jobs. Tests that measure times have the whole machine to themselves afterwards. A test that
fails is run once more when nothing else runs, so that a machine that stood still for seconds is no
failure; the output names what only passed then, and many failures are believed at once.
``PYTEST_ADDOPTS`` reaches all. Tests of the mark ``long`` run with ``--all`` only. The last lines
say what was skipped for want of a program or a device, and count all; the exit status is 1 if a
test failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
LONG = (
    ("images", "chart/test_pods_gateway.py", "chart/test_pods_model.py"),
    ("e2e", "deploy/test_cache_warm.py"),
    ("deploy/compress", "deploy/shrink"),
    ("kernels/plugin", "kernels/bench/test_engine_checkpoint.py"),
    ("kernels/launch/test_aot.py",),
)
"""The first jobs, in this order. Each makes something once for all its tests: images and their
checkpoint, a served model, a process that has vLLM or the compressor imported."""
ALL = ("-m", "")
"""Takes back that pytest leaves out what has the mark: minutes of work, for CI and for who changes
what it is on."""
TYPES = ["mypy"]
"""A job that is no run of pytest."""
FOLDERS = ("kernels", "deploy")
"""Each folder in them is of a job, but for what is named elsewhere."""
LEAST = 24
"""Files of a job, so that few starts of pytest import torch; the last has what is left."""
WAITING = ("chart", "service")
"""Each folder in them is of a job of the third track, but for what is named elsewhere. It has the
folders of no room and this folder's own tests, too."""
ALONE = (
    "deploy/test_bench_gateway.py",
    "deploy/test_bench_gateway_guard.py",
    "deploy/test_mock_engine.py",
    "deploy/test_validate_latency.py",
    "service/test_faults_overload.py",
    "service/test_json_bounds.py",
)
"""Of these folders, what measures times: a neighbour would be measured with it."""
BELIEVED = 20
"""More failures than these are the code's, whatever the machine did."""
SLOWEST = ("--durations=12", "--durations-min=4")
"""What each run says of its time."""
_SUMMARY = re.compile(r"^=+ (.*) in [0-9.]+s.* =+$")
_COUNT = re.compile(r"(\d+) ([a-z]+)")
_SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] .*?: (.*)$")
_WANTED = (
    (re.compile(r"\bNO (\S+) HERE"), None),
    (re.compile(r"no container engine"), "podman"),
    (re.compile(r"\bno (\S+) here"), None),
    (re.compile(r"no debootstrap"), "debootstrap"),
    (re.compile(r"no CUDA device|needs (?:a CUDA device|sm_\d+)"), "a CUDA device"),
    (re.compile(r"vLLM is not installed"), "vLLM"),
)
"""What the reason of a skip says is missing: its first group, or a name."""


class Result(NamedTuple):
    """What one run of pytest said.

    Attributes:
        status: its exit status.
        counts: of its summary.
        wanted: skipped tests by what they wanted.
        arguments: what pytest was given.
        cache: its cache directory, which knows the tests that failed.
    """

    status: int
    counts: Counter[str]
    wanted: Counter[str]
    arguments: Sequence[str]
    cache: Path

    @property
    def failed(self) -> set[str]:
        """The names of the tests that failed or had no fixture."""
        names = self.cache / "v" / "cache" / "lastfailed"
        return set(json.loads(names.read_text())) if self.status == 1 and names.exists() else set()


def jobs() -> list[list[str]]:
    """Return the files and folders of each run on the two tracks, the longest first."""
    return [[str(TESTS / name) for name in names] for names in LONG] + _joined(_left_of(FOLDERS))


def waiting() -> list[list[str]]:
    """Return the files of each run on the third track."""
    named = {Path(name).parts[0] for names in LONG for name in names} | {*FOLDERS, *WAITING}
    others = [file for file in TESTS.iterdir() if file.is_dir() and file.name not in named]
    rest = [*_left_of(file.name for file in others), *sorted(TESTS.glob("test_*.py"))]
    return [*_joined(_left_of(WAITING)), *([[str(file) for file in rest]] if rest else [])]


def alone() -> list[str]:
    """Return what measures times."""
    return [str(TESTS / name) for name in ALONE]


def _joined(files: Iterable[Path]) -> list[list[str]]:
    """Return files by folder, the fullest first, small folders together."""
    folders: dict[Path, list[str]] = {}
    for file in files:
        folders.setdefault(file.parent, []).append(str(file))
    joined: list[list[str]] = []
    for names in sorted(folders.values(), key=len, reverse=True):
        if joined and len(joined[-1]) < LEAST:
            joined[-1] += names
        else:
            joined.append(names)
    return joined


def _left_of(folders: Iterable[str]) -> list[Path]:
    """Return the files in folders that are named neither in LONG nor in ALONE."""
    named = [TESTS / name for names in (*LONG, ALONE) for name in names]
    files = sorted(file for name in folders for file in (TESTS / name).rglob("test_*.py"))
    return [file for file in files if not any(file.is_relative_to(place) for place in named)]


def halves() -> list[str]:
    """Return the cores of each track as taskset takes them; of a single core, that one twice."""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    middle = (len(cores) + 1) // 2
    return [",".join(half or cores) for half in (cores[:middle], cores[middle:])]


def counts_of(output: str) -> Counter[str]:
    """Return what the last line of pytest's summary counts; nothing where there is none."""
    found = [match[1] for line in output.splitlines() if (match := _SUMMARY.match(line))]
    return Counter({name: int(many) for many, name in _COUNT.findall(found[-1] if found else "")})


def wanted_of(output: str) -> Counter[str]:
    """Count the skipped tests by the program or device that they wanted."""
    found: Counter[str] = Counter()
    for many, reason in (
        match.groups() for line in output.splitlines() if (match := _SKIPPED.match(line))
    ):
        for pattern, name in _WANTED:
            if match := pattern.search(reason):
                found[name or match[1]] += int(many)
                break
    return found


def run(
    arguments: Sequence[str],
    say: Callable[[str], object],
    cores: str | None = None,
    cache: Path | None = None,
) -> Result:
    """Run pytest, or what a job is instead, passing on each line of what it prints.

    Args:
        arguments: of pytest; TYPES is a command of its own.
        say: takes the lines.
        cores: the only ones that it may use, as taskset takes them; None for all.
        cache: pytest's, to run again what failed; None for a new one.
    """
    again = ("--last-failed", "--last-failed-no-failures=none") if cache else ()
    cache = cache or Path(tempfile.mkdtemp(prefix="pytest-cache-"))
    known = ("-o", f"cache_dir={cache}", *again)
    command = [sys.executable, "-m", "pytest", "-ra", *SLOWEST, *known, *arguments]
    if arguments == TYPES:
        command = [sys.executable, "-m", *TYPES]
    if cores is not None:
        command = ["taskset", "--cpu-list", cores, *command]
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                say(line)
                lines.append(line)
        except BaseException:
            process.terminate()
            raise
    output = "".join(lines)
    counts, wanted = counts_of(output), wanted_of(output)
    return Result(process.returncode, counts, wanted, arguments, cache)


def take(queues: Iterable[deque[list[str]]]) -> list[str] | None:
    """Take the next job of the first queue that has one; None where none has."""
    for left in queues:
        with contextlib.suppress(IndexError):  # another track may take the last
            return left.popleft()
    return None


def _track(
    queues: Sequence[deque[list[str]]],
    results: list[Result],
    printing: threading.Lock,
    cores: str | None,
) -> None:
    """Run job after job until none is left; what each prints comes in one piece at its end."""
    while files := take(queues):
        lines: list[str] = []
        started = time.monotonic()
        results.append(run(files, lines.append, cores))
        took = time.monotonic() - started
        with printing:
            where = f"{took:.0f}s on cores {cores or 'of all'}"
            sys.stdout.write("".join((*lines, f"===== {where} =====\n")))
            sys.stdout.flush()


def run_again(results: Sequence[Result], say: Callable[[str], object]) -> list[Result]:
    """Run once more, alone, the tests that failed; return the results as they are then.

    Args:
        results: of all runs.
        say: takes what is printed, and the names of the tests that passed only now.
    """
    failed = sum(len(result.failed) for result in results)
    if failed > BELIEVED:
        say(f"===== {failed} tests failed: none is run again =====\n")
        return list(results)
    return [_again(result, say) if result.failed else result for result in results]


def _again(result: Result, say: Callable[[str], object]) -> Result:
    before = result.failed
    say(f"===== {len(before)} failed: once more, alone =====\n")
    second = run(result.arguments, say, cache=result.cache)
    passed = sorted(before - second.failed) if second.status in (0, 1) else []
    for name in passed:
        say(f"===== passed only alone: {name} =====\n")
    counts = result.counts.copy()
    for name in ("failed", "error", "errors"):
        counts[name] = second.counts[name]
    counts["passed"] += len(passed)
    return second._replace(counts=+counts, wanted=result.wanted)


def _totals(results: Iterable[Result]) -> tuple[Counter[str], Counter[str]]:
    counts, wanted = Counter[str](), Counter[str]()
    for result in results:
        counts += result.counts
        wanted += result.wanted
    return counts, wanted


def main(arguments: Sequence[str] = ()) -> int:
    """Run everything; return the exit status.

    Args:
        arguments: ``--all`` for the tests with the mark, too, ``--types`` for mypy.
    """
    started = time.monotonic()
    results, printing = list[Result](), threading.Lock()
    chosen = ALL if "--all" in arguments else ()
    busy, idle = (deque([*chosen, *job] for job in each) for each in (jobs(), waiting()))
    if "--types" in arguments:
        busy.insert(len(LONG), TYPES)
    mine, others = halves()
    tracks = (((busy, idle), others), ((idle, busy), None))
    threads = [
        threading.Thread(target=_track, args=(queues, results, printing, cores), daemon=True)
        for queues, cores in tracks
    ]
    for thread in threads:
        thread.start()
    _track((busy, idle), results, printing, mine)
    for thread in threads:
        thread.join()
    results.append(run([*chosen, *alone()], sys.stdout.write))
    results = run_again(results, sys.stdout.write)
    counts, wanted = _totals(results)
    if wanted:
        names = ", ".join(f"{many} {name}" for name, many in wanted.most_common())
        sys.stdout.write(f"===== skipped tests want: {names} =====\n")
    for result in results:
        shutil.rmtree(result.cache, ignore_errors=True)
    names = ", ".join(f"{many} {name}" for name, many in sorted(counts.items()))
    took = time.monotonic() - started
    sys.stdout.write(f"===== all runs: {names} in {took:.0f}s =====\n")
    return int(any(result.status for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
