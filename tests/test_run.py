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
    ignored = [Path(a.removeprefix("--ignore=")) for a in runner.behind() if a[0] == "-"]
    folders = [Path(a) for a in runner.behind() if a[0] != "-"]
    alone = [*(here / name for name in runner.FIRST), *map(Path, runner.others())]
    assert all(place.exists() for place in (*ignored, *folders, *alone))

    def of(file: Path, places: list[Path]) -> int:
        return sum(file.is_relative_to(place) for place in places)

    for file in here.rglob("test_*.py"):
        is_behind = of(file, folders) - bool(of(file, ignored) and of(file, folders))
        assert is_behind + of(file, alone) == 1, file


@pytest.mark.parametrize(
    "bad",
    [None, "kernels/test_of_kernels.py", "chart/test_pods_model.py", "deploy/test_mock_engine.py"],
)
def test_all_runs_are_counted_and_any_can_fail(
    bad: str | None,
    runner: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = (*runner.BEHIND, "e2e", "images", "service")
    folders = [f"{name}/test_of_{name}.py" for name in names]
    files = [name for name in (*runner.FIRST, *runner.ALONE) if name.endswith(".py")]
    for name in ("test_own.py", *folders, *files):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(TESTS.format(good=name != bad))
    monkeypatch.setattr(runner, "TESTS", tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-c /dev/null -p no:cacheprovider -p no:schemathesis")
    assert runner.main() == (bad is not None)
    last = capsys.readouterr().out.splitlines()[-1]
    failed = "1 failed, " if bad else ""
    many = 1 + len(folders) + len(files)
    assert many == 15
    counted = f"{failed}{3 * many - bool(bad)} passed, {many} skipped"
    assert last.startswith(f"===== all runs: {counted} in ")
