"""``make test`` counts both runs of pytest and fails if either does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TESTS = """
import pytest

def test_good():
    pass

@pytest.mark.skip(reason="for the count")
def test_left_out():
    pass

@pytest.mark.parametrize("good", [True, {good}])
def test_perhaps(good):
    assert good
"""


@pytest.fixture
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("runner", Path(__file__).with_name("run.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(folder: Path, *, good: bool) -> Path:
    file = folder / f"test_{good}.py"
    file.write_text(TESTS.format(good=good))
    return file


def test_both_runs_are_counted_and_either_can_fail(
    runner: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good, bad = (("-c", "/dev/null", str(written(tmp_path, good=ok))) for ok in (True, False))
    for alone, side_by_side, status in ((good, good, 0), (bad, good, 1), (good, bad, 1)):
        monkeypatch.setattr(runner, "ALONE", alone)
        monkeypatch.setattr(runner, "SIDE_BY_SIDE", side_by_side)
        assert runner.main() == status
        last = capsys.readouterr().out.splitlines()[-1]
        failed = "1 failed, " if status else ""
        assert last.startswith(f"===== both runs: {failed}{6 - status} passed, 2 skipped in ")
