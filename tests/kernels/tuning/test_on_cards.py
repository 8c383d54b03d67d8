"""Commands side by side, each with cards of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuning import on_cards


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    folder = tmp_path / "jobs"
    folder.mkdir()
    return folder


def put(jobs: Path, name: str, command: str, **settings: Any) -> None:
    told = {"name": name, "command": command, **settings}
    (jobs / f"{name}.json").write_text(json.dumps(told))


def run(jobs: Path, cards: int, seconds: float = 30) -> tuple[int, Path]:
    output = jobs.parent / "out"
    given = [str(jobs), "--output", str(output), "--cards", str(cards), "--seconds", str(seconds)]
    return on_cards.main(given), output


def result(output: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / name / "result.json").read_text())
    return found


def test_each_job_sees_cards_of_its_own(jobs: Path) -> None:
    for name, cards in (("a", 1), ("b", 2), ("c", 0)):
        put(jobs, name, "echo cards $CUDA_VISIBLE_DEVICES; sleep 0.5", cards=cards)
    code, output = run(jobs, 3)
    assert code == 0
    said = {name: (output / name / "log").read_text() for name in "abc"}
    assert said == {"a": "cards 0\n", "b": "cards 1,2\n", "c": "cards\n"}


def test_a_job_waits_for_cards_and_for_files_and_later_ones_pass_it(jobs: Path) -> None:
    there = jobs.parent / "there"
    put(jobs, "a", f"sleep 0.5; touch {there}")
    put(jobs, "b", "date +%s.%N", needs=[str(there)])
    put(jobs, "c", "date +%s.%N")
    code, output = run(jobs, 2)
    assert code == 0
    began = {name: float((output / name / "log").read_text()) for name in "bc"}
    assert began["c"] < began["b"]
    assert result(output, "b")["cards"] == [0]


def test_failures_and_limits_are_told(jobs: Path) -> None:
    put(jobs, "a", "exit 3")
    put(jobs, "b", "sleep 60 & wait", limit_s=0.5)
    put(jobs, "c", 'echo "$OF_MINE"; echo kept > $RESULTS/file', environment={"OF_MINE": "yes"})
    code, output = run(jobs, 1)
    assert code == 1
    assert result(output, "a")["code"] == 3
    assert result(output, "b")["code"] == on_cards.TIMED_OUT
    assert result(output, "b")["seconds"] < 20
    assert (output / "c" / "log").read_text() == "yes\n"
    assert (output / "c" / "file").read_text() == "kept\n"


def test_time_that_is_over_ends_everything(jobs: Path) -> None:
    put(jobs, "a", "sleep 60")
    put(jobs, "b", "true", needs=["/nowhere"])
    (jobs / "c.json").write_text('{"name": ')
    code, output = run(jobs, 1, seconds=1)
    assert code == 1
    assert result(output, "a")["code"] == on_cards.TIMED_OUT
    assert not (output / "b").exists()


def test_more_cards_than_there_are_is_refused_by_name(jobs: Path) -> None:
    put(jobs, "a", "true", cards=3)
    with pytest.raises(ValueError, match=r"a\.json: wants 3 cards, there are 2"):
        run(jobs, 2)
