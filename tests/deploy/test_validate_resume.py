"""A validation that was cut goes on where it stood, and ends as if it had not been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from validate_setup import FakeServer, job_for, perturb, write_model, write_text

from taut_deploy.validate import CouldNotValidateError, run_validation
from taut_deploy.validate import journal as journals

CHOICES = [{"prompt": f"w{i} w{i + 1}", "choices": [" w1", " w2"], "answer": 0} for i in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("resume")
    write_model(path / "baseline")
    perturb(path / "baseline", path / "candidate", lambda _, t: t * 1.05)
    write_text(path / "text.txt", 400)
    (path / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHOICES))
    return path


def job(folder, output, **changes):
    defaults = {"tasks": (folder / "task.jsonl",), "slices": ("languages",), "output": output}
    return job_for(folder, **(defaults | changes))


def timeless(report: Path) -> dict:
    content = json.loads(report.read_text())
    for name in ("started_at", "wall_time_s"):
        del content[name]
    del content["environment"]["peak_rss_bytes"]
    return content


def cut_at(stage: str, place: int):
    def progress(now: str, done: int, _: int) -> None:
        if (now, done) == (stage, place):
            raise KeyboardInterrupt

    return progress


CUTS = [("compare", 3), ("task task", 5), ("noise", 1)]


@pytest.mark.parametrize(("stage", "place"), CUTS)
def test_a_run_that_was_cut_ends_like_one_that_was_not(folder, tmp_path, stage, place):
    whole = run_validation(job(folder, tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        run_validation(job(folder, tmp_path / "cut", progress=cut_at(stage, place)))
    kept = (tmp_path / "cut" / "answers.jsonl").read_text().splitlines()
    asked = {(line["stage"], line["at"]) for line in map(json.loads, kept[1:])}
    assert (stage, place - 1) in asked

    again = run_validation(job(folder, tmp_path / "cut", resume=True))
    assert timeless(again.report_json) == timeless(whole.report_json)
    assert not (tmp_path / "cut" / "answers.jsonl").exists()
    assert not (tmp_path / "cut" / "partial.json").exists()


@pytest.mark.parametrize(
    ("ended", "error"),
    [
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("a bug"), "a bug"),
    ],
)
def test_whatever_ends_a_run_leaves_what_was_measured(folder, tmp_path, ended, error):
    def progress(stage: str, done: int, _: int) -> None:
        if (stage, done) == ("compare", 3):
            raise ended

    with pytest.raises(type(ended)):
        run_validation(job(folder, tmp_path / "cut", progress=progress))
    partial = json.loads((tmp_path / "cut" / "partial.json").read_text())
    assert (partial["complete"], partial["error"], len(partial["text"])) == (False, error, 3)


def test_a_terminated_run_is_marked_as_an_interrupted_one_is(folder, tmp_path):
    def progress(stage: str, done: int, _: int) -> None:
        if (stage, done) == ("compare", 2):
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run_validation(job(folder, tmp_path / "cut", progress=progress))
    assert signal.getsignal(signal.SIGTERM) is before
    partial = json.loads((tmp_path / "cut" / "partial.json").read_text())
    assert (partial["complete"], partial["error"]) == (False, "terminated")


def test_what_was_answered_is_not_asked_again(folder, tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        run_validation(job(folder, tmp_path / "cut", progress=cut_at("compare", 5)))
    asked = []
    append = journals.Journal._append
    monkeypatch.setattr(
        journals.Journal,
        "_append",
        lambda self, line: (asked.append((line["stage"], line["at"])), append(self, line))[1],
    )
    run_validation(job(folder, tmp_path / "cut"))
    assert [at for stage, at in asked if stage == "compare"] == [5]


def test_a_run_that_was_killed_goes_on(folder, tmp_path):
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from validate_setup import job_for\n"
        "from taut_deploy.validate import run_validation\n"
        "die = lambda s, d, n: os.kill(os.getpid(), 9) if (s, d) == ('compare', 4) else None\n"
        "run_validation(job_for(Path(sys.argv[2]), output=Path(sys.argv[3]), progress=die))\n"
    )
    output = tmp_path / "cut"
    tests = str(Path(__file__).parent)
    dead = subprocess.run(
        [sys.executable, "-c", code, tests, str(folder), str(output)], check=False, env=os.environ
    )
    assert dead.returncode == -signal.SIGKILL
    file = output / "answers.jsonl"
    with file.open("ab") as lines:
        lines.write(b'{"stage": "compare", "at": 4, "val')  # half a line, as a crash may leave it
    whole = run_validation(job_for(folder, output=tmp_path / "whole"))
    again = run_validation(job_for(folder, output=output, resume=True))
    assert timeless(again.report_json) == timeless(whole.report_json)


def other_candidate(folder, tmp_path):
    perturb(folder / "baseline", tmp_path / "other", lambda _, t: t * 1.1)
    return {"candidate": str(tmp_path / "other")}


def other_items(folder, tmp_path):
    (tmp_path / "task.jsonl").write_text((folder / "task.jsonl").read_text().replace("w3", "w4"))
    return {"tasks": (tmp_path / "task.jsonl",)}


OTHERS = {
    "candidate": (other_candidate, r"of another validation \(candidate differ\)"),
    "items": (other_items, r"of another validation \(tasks and slices, settings differ\)"),
    "seed": (lambda *_: {"seed": 3}, r"of another validation \(settings differ\)"),
    "text": (lambda *_: {"sequence_length": 20}, r"\(text, settings differ\)"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_answers_of_another_validation_are_refused_or_left_behind(folder, tmp_path, case):
    output = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run_validation(job(folder, output, progress=cut_at("compare", 2)))
    change, message = OTHERS[case]
    changes = change(folder, tmp_path)
    with pytest.raises(CouldNotValidateError, match=message) as refused:
        run_validation(job(folder, output, resume=True, **changes))
    assert "\n" not in str(refused.value)
    assert (output / "answers.jsonl").exists()
    fresh = run_validation(job(folder, tmp_path / "fresh", **changes))
    assert timeless(run_validation(job(folder, output, **changes)).report_json) == timeless(
        fresh.report_json
    )


def test_nothing_to_go_on_with_is_one_line(folder, tmp_path):
    with pytest.raises(CouldNotValidateError, match=r"--resume: .*no answers of an earlier run"):
        run_validation(job(folder, tmp_path / "r", resume=True))


def test_no_resume_begins_anew(folder, tmp_path):
    output = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run_validation(job(folder, output, progress=cut_at("compare", 4)))
    (file := output / "answers.jsonl").write_text(
        file.read_text().replace('"stage": "compare"', '"stage": "other"')
    )
    done = []
    run_validation(job(folder, output, resume=False, progress=lambda *call: done.append(call)))
    assert done[0] == ("compare", 1, 6)


def test_a_server_that_answers_otherwise_by_now_is_refused(folder, tmp_path):
    baseline, candidate = FakeServer(folder / "baseline"), FakeServer(folder / "candidate")
    with baseline.listening() as first, candidate.listening() as second:
        asked = {
            "baseline": first,
            "candidate": second,
            "latency": False,
            "tasks": (),
            "slices": (),
        }
        with pytest.raises(KeyboardInterrupt):
            run_validation(job(folder, tmp_path / "r", progress=cut_at("compare", 3), **asked))
        candidate.model.lm_head.weight.data *= 1.5
        with pytest.raises(CouldNotValidateError, match="candidate: answers otherwise than before"):
            run_validation(job(folder, tmp_path / "r", **asked))


@pytest.mark.parametrize("damage", ['{"stage": "compare"}\n', "nonsense\n"])
def test_a_damaged_line_is_named(folder, tmp_path, damage):
    output = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run_validation(job(folder, output, progress=cut_at("compare", 2)))
    with (output / "answers.jsonl").open("a") as lines:
        lines.write(damage)
    with pytest.raises(CouldNotValidateError, match=r"answers\.jsonl: line 4 is damaged"):
        run_validation(job(folder, output))
