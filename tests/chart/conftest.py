"""Makes the modules beside the tests importable, and says what the chart tests did not check."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "k8s"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which schemas there were, and which kinds had none."""
    from chart_rendering import NOTES

    if NOTES:
        terminalreporter.section("chart tests")
        for line in sorted(NOTES):
            terminalreporter.write_line(line)
