"""Run the whole suite: what ``make test`` does without ARGS.

Two runs of pytest. Kernels' tests compile and interpret on one core each and disturb nobody: they
share all cores. The others start servers, build images and measure times, one after another.
``PYTEST_ADDOPTS`` reaches both. The last line counts both; the exit status is 1 if either failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence

ALONE = ("tests", "--ignore=tests/kernels")
SIDE_BY_SIDE = ("tests/kernels", "-n", str(os.cpu_count() or 1), "--dist", "loadfile")
_SUMMARY = re.compile(r"^=+ (.*) in [0-9.]+s.* =+$")
_COUNT = re.compile(r"(\d+) ([a-z]+)")


def run(arguments: Sequence[str]) -> tuple[int, Counter[str]]:
    """Run pytest, passing on what it prints.

    Args:
        arguments: of pytest.

    Returns:
        Its exit status, and what the last line of its summary counts.
    """
    command = [sys.executable, "-m", "pytest", *arguments]
    counts: Counter[str] = Counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            if found := _SUMMARY.match(line):
                counts = Counter({name: int(many) for many, name in _COUNT.findall(found[1])})
    return process.returncode, counts


def main() -> int:
    """Run both; return the exit status."""
    started = time.monotonic()
    total: Counter[str] = Counter()
    failed = False
    for arguments in (ALONE, SIDE_BY_SIDE):
        status, counts = run(arguments)
        total += counts
        failed |= status != 0
    took = time.monotonic() - started
    names = ", ".join(f"{many} {name}" for name, many in sorted(total.items()))
    sys.stdout.write(f"===== both runs: {names} in {took:.0f}s =====\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
