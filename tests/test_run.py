"""``make test`` leaves no test out, counts every run of pytest and fails if one does."""

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


def test_no_test_is_left_out(runner: ModuleType) -> None:
    here = Path(__file__).parent
    chosen = [here / name for name in (*runner.BEHIND, *runner.FIRST)]
    chosen += map(Path, runner.others())
    for file in here.rglob("test_*.py"):
        assert sum(file.is_relative_to(place) for place in chosen) == 1, file


@pytest.mark.parametrize("bad", [None, "kernels", "service"])
def test_all_runs_are_counted_and_any_can_fail(
    bad: str | None,
    runner: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("kernels", "chart", "e2e", "images", "service", "test_own.py"):
        file = tmp_path / name
        if not file.suffix:
            file.mkdir()
            file = file / f"test_{name}.py"
        file.write_text(TESTS.format(good=name != bad))
    monkeypatch.setattr(runner, "TESTS", tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-c /dev/null -p no:cacheprovider -p no:schemathesis")
    assert runner.main() == (bad is not None)
    last = capsys.readouterr().out.splitlines()[-1]
    failed = "1 failed, " if bad else ""
    assert last.startswith(f"===== all runs: {failed}{18 - bool(bad)} passed, 6 skipped in ")
