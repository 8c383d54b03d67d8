"""Makes the modules beside the tests importable: pytest's importlib mode adds no folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many cases the scaled tests had (TAUT_FAULT_SCALE, TAUT_FUZZ_CASES)."""
    from live_processes import COUNTS

    if COUNTS:
        terminalreporter.section("fault and fuzz tests")
        for line in COUNTS:
            terminalreporter.write_line(line)
