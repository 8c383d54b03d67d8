"""``make test`` leaves no test out, counts every run of pytest and fails if one does."""

from __future__ import annotations

import importlib.util
from collections import deque
from pathlib import Path
from types import ModuleType

import pytest

TESTS = """
import pytest

def test_good():
    pass

@pytest.mark.skip(reason="NO frobnicator HERE")
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
    places = [
        Path(place)
        for places in (*runner.jobs(), *runner.waiting(), runner.alone())
        for place in places
    ]
    assert all(place.exists() for place in places)
    for file in here.rglob("test_*.py"):
        assert sum(file.is_relative_to(place) for place in places) == 1, file


def test_what_measures_times_has_no_neighbour(runner: ModuleType) -> None:
    service = Path(__file__).parent / "service"
    overload, bad_input = (
        str(service / f"test_{name}.py") for name in ("faults_overload", "bad_input")
    )
    waiting = [file for files in runner.waiting() for file in files]
    assert overload in runner.alone() and overload not in waiting
    assert bad_input in waiting and bad_input not in runner.alone()
    assert set(runner.alone()) == {str(service.parent / name) for name in runner.ALONE}


def test_a_track_without_jobs_of_its_own_takes_the_others(runner: ModuleType) -> None:
    own, others = deque([["a"], ["b"]]), deque([["c"]])
    assert [runner.take((own, others)) for _ in range(4)] == [["a"], ["b"], ["c"], None]


def test_folders_of_no_room_and_own_tests_wait(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("docs/test_a.py", "service/x/test_b.py", "test_own.py", "pages/browser.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(runner, "TESTS", tmp_path)
    monkeypatch.setattr(runner, "ALONE", ())
    wanted = [["service/x/test_b.py"], ["docs/test_a.py", "test_own.py"]]
    assert runner.waiting() == [[str(tmp_path / name) for name in job] for job in wanted]
    assert runner.alone() == []


MARKED = """
import pytest

def test_sample():
    pass

@pytest.mark.long
def test_form():
    pass
"""


@pytest.mark.parametrize(
    ("arguments", "counted"),
    [((), "1 deselected, 2 passed"), (("--all",), "3 passed")],
)
def test_what_has_the_mark_runs_where_all_is_asked_for(
    arguments: tuple[str, ...],
    counted: str,
    runner: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "test_forms.py").write_text(MARKED)
    for name in ("TESTS", "LONG", "ALONE", "WAITING"):
        monkeypatch.setattr(runner, name, tmp_path if name == "TESTS" else ())
    (tmp_path / "alone.py").write_text("def test_times(): pass")
    monkeypatch.setattr(runner, "alone", lambda: [str(tmp_path / "alone.py")])
    options = "-c /dev/null -p no:cacheprovider -m 'not long' -W ignore"
    monkeypatch.setenv("PYTEST_ADDOPTS", options)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    runner.main(arguments)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"===== all runs: {counted} in "), last


@pytest.mark.parametrize(("text", "status"), [("x: int = 1", 0), ("x: int = ''", 1)])
def test_types_are_a_job_that_can_fail(
    text: str,
    status: int,
    runner: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "test_own.py").write_text("def test_good(): pass")
    (tmp_path / "mypy.ini").write_text("[mypy]\nfiles = typed.py")
    (tmp_path / "typed.py").write_text(text)
    for name in ("LONG", "ALONE", "WAITING"):
        monkeypatch.setattr(runner, name, ())
    monkeypatch.setattr(runner, "TESTS", tmp_path)
    monkeypatch.setattr(runner, "alone", lambda: [str(tmp_path / "test_own.py")])
    monkeypatch.setenv("PYTEST_ADDOPTS", "-c /dev/null")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.chdir(tmp_path)
    assert runner.main(["--types"]) == status
    printed = capsys.readouterr().out
    assert ("typed.py:1: error" in printed) == bool(status)
    assert "===== all runs: 2 passed in " in printed


def test_small_folders_share_a_start_of_pytest(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, many in {"kernels/a": 3, "kernels/b": 2, "deploy/c": 1, "deploy/d": 1}.items():
        (tmp_path / name).mkdir(parents=True)
        for i in range(many):
            (tmp_path / name / f"test_{i}.py").touch()
    monkeypatch.setattr(runner, "TESTS", tmp_path)
    monkeypatch.setattr(runner, "LONG", ())
    monkeypatch.setattr(runner, "LEAST", 4)
    jobs = [sorted({Path(file).parent.name for file in job}) for job in runner.jobs()]
    assert jobs == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize(
    ("cores", "halves"),
    [({0, 1}, ["0", "1"]), ({0, 2, 4, 6, 7}, ["0,2,4", "6,7"]), ({3}, ["3", "3"])],
)
def test_each_track_has_its_half_of_the_cores(
    cores: set[int], halves: list[str], runner: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: cores)
    assert runner.halves() == halves


def test_skips_are_counted_by_what_they_want(runner: ModuleType) -> None:
    output = """
SKIPPED [3] tests/chart/conftest.py:40: NO helm HERE: the chart is NOT tested
SKIPPED [2] tests/images/conftest.py:9: NOT RUN, no container engine: podman: not found
SKIPPED [1] tests/images/a.py: NOT RUN, no base image: no debootstrap (apt-get install debootstrap)
SKIPPED [4] tests/images/a.py:7: NOT RUN: no syft here (make container-tools chart-tools)
SKIPPED [5] tests/kernels/a.py:1: no CUDA device
SKIPPED [6] tests/kernels/b.py:1: needs a CUDA device
SKIPPED [1] tests/kernels/b.py:2: programmatic dependent launch needs sm_90
SKIPPED [1] tests/kernels/c.py:2: there is a CUDA device
========= 3 passed, 22 skipped in 1.00s =========
"""
    wanted = {"helm": 3, "podman": 2, "debootstrap": 1, "syft": 4, "a CUDA device": 12}
    assert runner.wanted_of(output) == wanted


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
    long = [name for names in runner.LONG for name in names]
    names = [
        name
        for name in (*runner.FOLDERS, *runner.WAITING, *long, "house")
        if not name.endswith(".py")
    ]
    folders = [f"{name}/test_of_{Path(name).name}.py" for name in names]
    files = [name for name in (*long, *runner.ALONE) if name.endswith(".py")]
    for name in ("test_own.py", *folders, *files):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(TESTS.format(good=name != bad))
    monkeypatch.setattr(runner, "TESTS", tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-c /dev/null")
    # None of them is needed, and every start of pytest would load them.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    assert runner.main() == (bad is not None)
    *_, wants, last = capsys.readouterr().out.splitlines()
    failed = "1 failed, " if bad else ""
    many = 1 + len(folders) + len(files)
    assert many == 22
    counted = f"{failed}{3 * many - bool(bad)} passed, {many} skipped"
    assert last.startswith(f"===== all runs: {counted} in ")
    assert wants == f"===== skipped tests want: {many} frobnicator ====="


ONCE = """
from pathlib import Path

import pytest

@pytest.fixture
def late():
    seen = Path(__file__).with_suffix(".seen")
    if not seen.exists():
        seen.touch()
        raise TimeoutError

def test_stalled(late):
    pass

def test_good():
    pass

@pytest.mark.parametrize("number", range({bad}))
def test_bad(number):
    assert number < 0
"""


@pytest.mark.parametrize(
    ("bad", "counted"),
    [(0, "3 passed, 1 skipped"), (2, "2 failed, 3 passed"), (20, "1 error, 20 failed, 2 passed")],
)
def test_what_fails_runs_once_more_alone(
    bad: int,
    counted: str,
    runner: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "test_own.py").write_text(ONCE.format(bad=bad))
    monkeypatch.setattr(runner, "TESTS", tmp_path)
    monkeypatch.setattr(runner, "jobs", lambda: [[str(tmp_path / "test_own.py")]])
    monkeypatch.setattr(runner, "waiting", list)
    quiet = tmp_path / "quiet" / "test_quiet.py"
    quiet.parent.mkdir()
    quiet.write_text("def test_good():\n    pass\n")
    monkeypatch.setattr(runner, "alone", lambda: [str(quiet)])
    monkeypatch.setenv("PYTEST_ADDOPTS", "-c /dev/null")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    assert runner.main() == (bad > 0)
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"===== all runs: {counted} in ")
    again = [line for line in lines if line.startswith("===== passed only alone: ")]
    assert [line.split("::")[1] for line in again] == ["test_stalled ====="] * (bad < 20)
