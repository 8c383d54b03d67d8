"""Run the whole suite: what ``make test`` does without ARGS.

Three runs of pytest. Where images are built and vLLM starts, mostly one core works: the kernels'
tests, which disturb nobody, have the last core meanwhile. Tests that measure times, or kill and
restart what they started, have the machine to themselves afterwards. ``PYTEST_ADDOPTS`` reaches
all. The last line counts all; the exit status is 1 if one failed.
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
BEHIND = ("kernels",)
FIRST = ("chart", "e2e", "images")
_SUMMARY = re.compile(r"^=+ (.*) in [0-9.]+s.* =+$")
_COUNT = re.compile(r"(\d+) ([a-z]+)")


def others() -> list[str]:
    """Return what is neither in the first run nor behind it, this folder's own tests included."""
    left = [f for f in sorted(TESTS.iterdir()) if f.name not in (*BEHIND, *FIRST)]
    return [str(f) for f in left if f.is_dir() and any(f.glob("test_*.py"))] + [
        str(f) for f in left if f.match("test_*.py")
    ]


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
        behind = start_behind([str(TESTS / name) for name in BEHIND], output)
        try:
            first = run([str(TESTS / name) for name in FIRST])
            sys.stdout.write("\n===== what ran behind them =====\n")
            sys.stdout.flush()
            behind.wait()
        finally:
            behind.kill()
        output.seek(0)
        text = output.read()
    sys.stdout.write(text)
    results = [first, (behind.returncode, counts_of(text)), run(others())]
    total = sum((counts for _, counts in results), Counter[str]())
    names = ", ".join(f"{many} {name}" for name, many in sorted(total.items()))
    took = time.monotonic() - started
    sys.stdout.write(f"===== all runs: {names} in {took:.0f}s =====\n")
    return int(any(status for status, _ in results))


if __name__ == "__main__":
    sys.exit(main())
