"""Run the whole suite: what ``make test`` does without ARGS.

Three runs of pytest. Where images are built and vLLM starts, mostly one core works: tests that
disturb nobody and wait for nobody, the kernels' above all, have the last core meanwhile. Tests that
measure times, or serve under load, have the machine to themselves afterwards. ``PYTEST_ADDOPTS``
reaches all. The last line counts all; the exit status is 1 if one failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO

TESTS = Path(__file__).parent
BEHIND = ("kernels", "chart", "deploy")
"""Folders; of them what neither of the others has."""
FIRST = ("chart/test_pods_gateway.py", "chart/test_pods_model.py", "e2e", "images")
ALONE = (
    "deploy/test_bench_gateway.py",
    "deploy/test_bench_serve.py",
    "deploy/test_mock_engine.py",
    "deploy/test_serve_process.py",
    "deploy/test_validate_latency.py",
    "deploy/test_validate_latency_job.py",
)
"""Of the folders behind, what measures times or has to answer within some."""
_SUMMARY = re.compile(r"^=+ (.*) in [0-9.]+s.* =+$")
_COUNT = re.compile(r"(\d+) ([a-z]+)")


def behind() -> list[str]:
    """Return pytest's arguments for what runs behind the first run."""
    elsewhere = [TESTS / name for name in (*FIRST, *ALONE)]
    return [*(str(TESTS / name) for name in BEHIND), *(f"--ignore={f}" for f in elsewhere)]


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


def run(arguments: Sequence[str]) -> tuple[int, Counter[str]]:
    """Run pytest, passing on what it prints.

    Args:
        arguments: of pytest.

    Returns:
        Its exit status, and what its summary counts.
    """
    lines = []
    with subprocess.Popen(_pytest(arguments), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            lines.append(line)
    return process.returncode, counts_of("".join(lines))


def start_behind(arguments: Sequence[str], output: IO[str]) -> subprocess.Popen[str]:
    """Start pytest on the last core, behind whatever else wants it.

    Args:
        arguments: of pytest.
        output: file for what it prints.
    """
    last = str(max(os.sched_getaffinity(0)))
    pinned = ["taskset", "--cpu-list", last, "nice", "-n", "19", *_pytest(arguments)]
    return subprocess.Popen(pinned, stdout=output, stderr=subprocess.STDOUT, text=True)


def _pytest(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", *arguments]


def main() -> int:
    """Run everything; return the exit status."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        second = start_behind(behind(), output)
        try:
            first = run([str(TESTS / name) for name in FIRST])
            sys.stdout.write("\n===== what ran behind them =====\n")
            sys.stdout.flush()
            second.wait()
        finally:
            second.kill()
        output.seek(0)
        text = output.read()
    sys.stdout.write(text)
    results = [first, (second.returncode, counts_of(text)), run(others())]
    total = sum((counts for _, counts in results), Counter[str]())
    names = ", ".join(f"{many} {name}" for name, many in sorted(total.items()))
    took = time.monotonic() - started
    sys.stdout.write(f"===== all runs: {names} in {took:.0f}s =====\n")
    return int(any(status for status, _ in results))


if __name__ == "__main__":
    sys.exit(main())
