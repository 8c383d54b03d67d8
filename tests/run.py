"""Run the whole suite: what ``make test`` does without ARGS.

Where images are built and vLLM starts, mostly one core works: tests that disturb nobody and wait
for nobody, the kernels' above all, have the last core meanwhile, a folder at a time, and both cores
once the others are done. Tests that measure times, or serve under load, have the machine to
themselves afterwards. ``PYTEST_ADDOPTS`` reaches all. The last lines say what was skipped for want
of a program or a device, and count all; the exit status is 1 if a test failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
BEHIND = ("kernels", "chart", "deploy")
"""Folders; of them what neither of the others has."""
FIRST = (
    "chart/test_pods_gateway.py",
    "chart/test_pods_model.py",
    "deploy/test_cache_warm.py",
    "e2e",
    "images",
)
ALONE = (
    "deploy/test_bench_gateway.py",
    "deploy/test_bench_serve.py",
    "deploy/test_mock_engine.py",
    "deploy/test_serve_process.py",
    "deploy/test_validate_latency.py",
    "deploy/test_validate_latency_job.py",
)
"""Of the folders behind, what measures times or has to answer within some."""
NICE = 10
"""Of what runs behind: a tenth of its core where the others want that, too. With less, tests would
take longer than they may."""
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
    """

    status: int
    counts: Counter[str]
    wanted: Counter[str]


def behind() -> list[list[str]]:
    """Return the files of each run behind the first, the largest folder first."""
    elsewhere = [TESTS / name for name in (*FIRST, *ALONE)]
    folders: dict[Path, list[str]] = {}
    for file in sorted(file for name in BEHIND for file in (TESTS / name).rglob("test_*.py")):
        if not any(file.is_relative_to(place) for place in elsewhere):
            folders.setdefault(file.parent, []).append(str(file))
    return sorted(folders.values(), key=len, reverse=True)


def others() -> list[str]:
    """Return what is in neither of these runs, this folder's own tests included."""
    taken = {Path(name).parts[0] for name in (*BEHIND, *FIRST)}
    left = [file for file in sorted(TESTS.iterdir()) if file.name not in taken]
    folders = [file for file in left if file.is_dir() and any(file.glob("test_*.py"))]
    files = [file for file in left if file.match("test_*.py")]
    return [str(file) for file in (*(TESTS / name for name in ALONE), *folders, *files)]


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


def run(arguments: Sequence[str], say: Callable[[str], object], pinned: bool = False) -> Result:
    """Run pytest, passing on each line of what it prints.

    Args:
        arguments: of pytest.
        say: takes the lines.
        pinned: on the last core, behind whatever else wants that.
    """
    command = [sys.executable, "-m", "pytest", "-ra", *SLOWEST, *arguments]
    if pinned:
        last = str(max(os.sched_getaffinity(0)))
        command = ["taskset", "--cpu-list", last, "nice", "-n", str(NICE), *command]
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
    return Result(process.returncode, counts_of(output), wanted_of(output))


def _drain(
    folders: deque[list[str]], results: list[Result], printing: threading.Lock, pinned: bool
) -> None:
    """Run folder after folder until none is left; what each prints comes in one piece."""
    while folders:
        try:
            files = folders.popleft()
        except IndexError:  # the other took the last
            return
        lines: list[str] = []
        results.append(run(files, lines.append, pinned))
        with printing:
            sys.stdout.write("".join(lines))
            sys.stdout.flush()


def _totals(results: Iterable[Result]) -> tuple[Counter[str], Counter[str]]:
    counts, wanted = Counter[str](), Counter[str]()
    for result in results:
        counts += result.counts
        wanted += result.wanted
    return counts, wanted


def main() -> int:
    """Run everything; return the exit status."""
    started = time.monotonic()
    folders, results, printing = deque(behind()), list[Result](), threading.Lock()
    second = threading.Thread(target=_drain, args=(folders, results, printing, True), daemon=True)
    second.start()

    def say(line: str) -> None:
        with printing:
            sys.stdout.write(line)
            sys.stdout.flush()

    results.append(run([str(TESTS / name) for name in FIRST], say))
    _drain(folders, results, printing, pinned=False)
    second.join()
    results.append(run(others(), say))
    counts, wanted = _totals(results)
    if wanted:
        names = ", ".join(f"{many} {name}" for name, many in wanted.most_common())
        sys.stdout.write(f"===== skipped tests want: {names} =====\n")
    names = ", ".join(f"{many} {name}" for name, many in sorted(counts.items()))
    took = time.monotonic() - started
    sys.stdout.write(f"===== all runs: {names} in {took:.0f}s =====\n")
    return int(any(result.status for result in results))


if __name__ == "__main__":
    sys.exit(main())
