"""Makes the modules beside the tests importable, and says what the chart tests did not check."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from api_server import Store
    from releases import Helm

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "k8s"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which schemas there were, and which kinds had none."""
    from chart_rendering import NOTES

    if NOTES:
        terminalreporter.section("chart tests")
        for line in sorted(NOTES):
            terminalreporter.write_line(line)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[Store, Helm]]:
    """A stand-in for a cluster, and helm for it."""
    from releases import release

    with release(tmp_path) as made:
        yield made
