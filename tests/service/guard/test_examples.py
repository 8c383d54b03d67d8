"""The folder of examples: refused at the start, kept small, and others' files left alone."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from taut_service.config.settings import Examples, SettingsError
from taut_service.guard.compare import Comparison
from taut_service.guard.examples import ExampleFiles

DIFFERENT = Comparison("compared", "chat", first=2, prompt="a question", answer="an answer")


def settings_of(folder: Path, **fields: float) -> Examples:
    return Examples.model_validate({"directory": str(folder), "ratio": 1.0, **fields})


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "examples"
    with pytest.raises(SettingsError, match=rf"guard\.examples\.directory: {folder}: Not a dir"):
        ExampleFiles(settings_of(folder))


def test_a_folder_that_cannot_be_written_to_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere, whatever the mode says.
    monkeypatch.setattr("taut_service.guard.examples.os.access", lambda *_: False)
    with pytest.raises(SettingsError, match=rf"{tmp_path}: cannot be written to"):
        ExampleFiles(settings_of(tmp_path))


def test_answers_that_agree_are_not_kept(tmp_path: Path) -> None:
    assert ExampleFiles(settings_of(tmp_path)).keep("m", "small", Comparison("compared")) is None
    assert list(tmp_path.iterdir()) == []


def test_what_is_too_old_is_deleted_and_what_others_put_there_stays(tmp_path: Path) -> None:
    now = time.time_ns()
    old, young = (tmp_path / f"{now - age * 10**9}.example.json" for age in (90, 30))
    own = [tmp_path / name for name in ("notes.example.json", f"- {old.name}", f"{now} (copy)")]
    for file in (old, young, *own):
        file.write_text("{}")
    kept = ExampleFiles(settings_of(tmp_path, keep_s=60, max_files=5)).keep("m", "s", DIFFERENT)
    assert kept is not None and json.loads(kept.read_text())["first_different_token"] == 2
    assert {*tmp_path.iterdir()} == {young, kept, *own}


def test_half_of_a_surrogate_pair_is_kept_as_it_was_sent(tmp_path: Path) -> None:
    found = Comparison("compared", "chat", first=2, prompt="é\ud83d", answer="\ude00")
    kept = ExampleFiles(settings_of(tmp_path)).keep("m", "small", found)
    assert kept is not None
    read = json.loads(kept.read_text(encoding="utf-8"))
    assert (read["prompt_end"], read["answer_beginning"]) == ("é\ud83d", "\ude00")
