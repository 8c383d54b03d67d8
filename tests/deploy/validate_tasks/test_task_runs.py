"""Tasks inside a whole validation: directories, servers, policies, and what breaks off."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from recorded_harness import RECORDED, ROLES, Harness
from typer.testing import CliRunner
from validate_setup import WORDS, FakeServer, add_noise, job_for, write_model, write_text

from taut_deploy.cli import app, main
from taut_deploy.validate import CouldNotValidateError, Verdict, run_validation

HARNESS_MODEL = "taut_deploy.validate.tasks.harness_model"
LOOSE = "name: loose\nrequire: {perplexity_ratio: {max: 1000}}\n"


def choices(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        draw = [WORDS[i] for i in torch.randperm(len(WORDS), generator=generator).tolist()]
        yield {
            "prompt": " ".join(draw[:4]),
            "choices": [f" {draw[4]}", f" {draw[5]} {draw[6]}", f" {draw[7]}"],
            "answer": number % 3,
            "id": f"q{number}",
        }


def generated(count):
    for number in range(count):
        prompt = f"{WORDS[number]} {WORDS[number + 1]}"
        yield {"prompt": prompt, "reference": "w1", "match": "contains", "max_tokens": 6}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks")
    write_model(path / "baseline")
    add_noise(path / "baseline", path / "candidate", 0.2)
    write_text(path / "text.txt", 400)
    write_rows(path / "arc.jsonl", choices(40))
    write_rows(path / "gen.jsonl", generated(12))
    (path / "loose.yaml").write_text(LOOSE)
    return path


def validate(folder, output, policy="", **changes):
    file = output.parent / "p.yaml"
    file.write_text(LOOSE + policy)
    defaults = {"policy": file, "output": output, "noise_sequences": 0}
    return run_validation(job_for(folder, **(defaults | changes)))


def answers(report, name):
    task = report["tasks"]["tasks"][name]
    return task["counts"], task["accuracy"], task["answers_changed"]


def test_servers_answer_as_directories_do(folder, tmp_path):
    files = {"tasks": (folder / "arc.jsonl", folder / "gen.jsonl")}
    local = validate(folder, tmp_path / "dirs", **files).report
    assert local["verdicts"]["tasks"] is None, "no limits, nothing judged"
    baseline, candidate = FakeServer(folder / "baseline"), FakeServer(folder / "candidate")
    with baseline.listening() as first, candidate.listening() as second:
        urls = {"baseline": first, "candidate": second, "latency": False}
        served = validate(folder, tmp_path / "urls", **files, **urls).report
    for name in ("arc", "gen"):
        assert answers(served, name) == answers(local, name)
    assert local["tasks"]["tasks"]["arc"]["kind"] == "choices"
    assert local["tasks"]["tasks"]["gen"]["kind"] == "generated"
    assert sum(local["tasks"]["tasks"]["arc"]["counts"].values()) == 40
    assert local["tasks"]["tasks"]["arc"]["answers_changed"] > 0


def test_equal_models_recover_everything(folder, tmp_path):
    policy = "tasks: {any: {recovery: {min: 0.5}, flips: {max: 0.2}}}"
    same = {"candidate": str(folder / "baseline"), "tasks": (folder / "arc.jsonl",)}
    result = validate(folder, tmp_path / "r", policy, **same)
    assert (result.verdict, result.report["verdicts"]["tasks"]) == (Verdict.PASS, "PASS")
    task = result.report["tasks"]["tasks"]["arc"]
    assert task["metrics"]["recovery"]["estimate"] == 1.0
    assert (task["mcnemar_p"], task["mcnemar_p_holm"]) == (1.0, 1.0)
    text = result.report_markdown.read_text()
    assert "## Tasks" in text
    assert "arc: recovery" in text
    assert "arc recovery min 0.5" in result.report_junit.read_text()


def test_a_policys_file_lies_beside_it_and_its_limits_fail(folder, tmp_path):
    write_rows(tmp_path / "mine.jsonl", choices(40))
    policy = "tasks: {mine: {file: mine.jsonl, flips: {max: 0.001}, score: per_byte}}"
    result = validate(folder, tmp_path / "r", policy)
    assert (result.verdict, result.report["verdicts"]["tasks"]) == (Verdict.FAIL, "FAIL")
    assert result.report["tasks"]["tasks"]["mine"]["score"] == "per_byte"


def test_a_required_task_without_a_source_stays_undecided(folder, tmp_path):
    policy = "tasks: {mmlu: {recovery: {min: 0.9}}}"
    result = validate(folder, tmp_path / "a", policy)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "--task" in result.rules[-1].reason
    policy = "tasks: {mmlu: {recovery: {min: 0.9}, required: false}}"
    assert validate(folder, tmp_path / "b", policy).verdict is Verdict.PASS


def test_max_items_bounds_the_work(folder, tmp_path):
    report = validate(folder, tmp_path / "r", tasks=(folder / "arc.jsonl",), max_items=7).report
    task = report["tasks"]["tasks"]["arc"]
    assert (task["items"], task["items_available"]) == (7, 40)


@pytest.mark.parametrize(
    ("changes", "policy", "problem"),
    [
        ({"tasks": ["arc.jsonl", "sub/arc.jsonl"]}, "", "two tasks are named arc"),
        ({}, "tasks: {any: {file: arc.jsonl}}", "tasks.any.file: 'any' bounds the tasks"),
        ({}, "tasks: {a: {file: gone.jsonl}}", "tasks.a.file .*gone.jsonl: No such file"),
        ({}, "tasks: {a: {recovry: {min: 1}}}", "tasks.a.recovry: unknown key.*'recovery'"),
        ({}, "tasks: {a: {flips: {max: 7}}}", "flips.max: 7, and the metric is from 0 to 1; 7 %"),
        ({}, "task: {}", "task: unknown key.*'tasks'"),
        ({"max_items": 1}, "", "--max-items: 1 is below 2"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(folder, tmp_path, changes, policy, problem):
    (tmp_path / "sub").mkdir()
    for place in ("arc.jsonl", "sub/arc.jsonl"):
        write_rows(tmp_path / place, choices(3))
    changes = dict(changes)
    if "tasks" in changes:
        changes["tasks"] = tuple(tmp_path / file for file in changes["tasks"])
    models = {"baseline": str(folder / "text.txt"), "candidate": str(folder / "text.txt")}
    with pytest.raises(CouldNotValidateError, match=problem) as caught:
        validate(folder, tmp_path / "r", policy, **models, **changes)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "r").exists()


def dying(server, after):
    """Answers 500 from the ``after``-th scored prompt on."""
    count = iter(range(1_000_000))

    def alter(path, body):
        return 500 if path == "/v1/completions" and next(count) >= after else body

    server.alter = alter


def broken(server, after):
    """Gives NaN from the ``after``-th scored prompt on."""
    count = iter(range(1_000_000))

    def alter(path, body):
        if path == "/v1/completions" and next(count) >= after:
            for entry in body["choices"][0]["prompt_logprobs"][1:]:
                entry[next(iter(entry))]["logprob"] = float("nan")
        return body

    server.alter = alter


def gone(server, after):
    """Closes every connection without a word from the ``after``-th scored prompt on."""
    count = iter(range(1_000_000))

    def alter(path, body):
        return None if path == "/v1/completions" and next(count) >= after else body

    server.alter = alter


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (dying, "answered 500"),
        (broken, "NaN or infinite log-prob"),
        (gone, r"gave no answer \(ConnectionError\); is the server up"),
    ],
)
def test_a_server_that_breaks_in_mid_run_leaves_what_was_measured(folder, tmp_path, harm, problem):
    baseline, candidate = FakeServer(folder / "baseline"), FakeServer(folder / "candidate")
    # Six sequences of text, then three choices an item: it breaks in the fifth item.
    harm(candidate, 6 + 4 * 3 + 1)
    with baseline.listening() as first, candidate.listening() as second:
        urls = {"baseline": first, "candidate": second, "latency": False}
        output = tmp_path / "r"
        with pytest.raises(CouldNotValidateError, match=problem) as caught:
            validate(folder, output, tasks=(folder / "arc.jsonl",), **urls)
    assert str(caught.value).endswith(f"what was measured is in {output / 'partial.json'}")
    kept = json.loads((output / "partial.json").read_text())
    assert (kept["complete"], "verdict" in kept) == (False, False)
    assert (len(kept["text"]), len(kept["tasks"]["arc"])) == (6, 4)
    assert kept["error"] in str(caught.value)
    again = validate(folder, output, tasks=(folder / "arc.jsonl",))
    assert again.report_json.exists()
    assert not (output / "partial.json").exists()


@pytest.mark.parametrize(
    ("harm", "problem"), [(broken, "NaN or infinite"), (gone, "is the server up")]
)
def test_the_command_says_what_broke_and_keeps_what_was_measured(
    folder, tmp_path, capsys, harm, problem
):
    baseline, candidate = FakeServer(folder / "baseline"), FakeServer(folder / "candidate")
    harm(candidate, 4)
    with baseline.listening() as first, candidate.listening() as second:
        given = ["validate", f"--baseline={first}", f"--candidate={second}", "--no-latency"]
        given += [f"--policy={folder / 'loose.yaml'}", f"--text={folder / 'text.txt'}"]
        given += [f"--output={tmp_path / 'r'}", "--sequences=6", "--sequence-length=24"]
        assert main(given) == 3
    said = capsys.readouterr().err.strip().splitlines()
    assert second in said[-1] and problem in said[-1], said
    assert not any("Traceback" in line for line in said)
    assert sorted(file.name for file in (tmp_path / "r").glob("*.json")) == ["partial.json"]
    kept = json.loads((tmp_path / "r" / "partial.json").read_text())
    assert (kept["complete"], len(kept["text"])) == (False, 4)


def test_a_task_without_a_source_is_told_before_anything_is_loaded(folder, tmp_path, monkeypatch):
    said = []

    def begins(*_):
        said.append("begins")
        raise CouldNotValidateError("ends here")

    monkeypatch.setattr("taut_deploy.validate.run.run", begins)
    file = tmp_path / "p.yaml"
    file.write_text(
        LOOSE + "tasks:\n  mmlu: {recovery: {min: 0.9}}\n  any: {recovery: {min: 0.9}}\n"
        "  mine: {required: false, recovery: {min: 0.9}}\n"
    )
    with pytest.raises(CouldNotValidateError, match="ends here"):
        run_validation(job_for(folder, policy=file, output=tmp_path / "r"), said.append)
    assert "tasks.mmlu: nothing supplies it, so no verdict is PASS" in said[0]
    assert said[1:] == ["begins"]


def test_the_command_takes_tasks(folder, tmp_path):
    arguments = ["validate", f"--baseline={folder / 'baseline'}"]
    arguments += [f"--candidate={folder / 'baseline'}", f"--policy={folder / 'loose.yaml'}"]
    arguments += [f"--text={folder / 'text.txt'}", f"--output={tmp_path / 'r'}", "--no-served"]
    arguments += ["--sequences=4", "--sequence-length=24", "--noise-sequences=0"]
    arguments += [f"--task={folder / 'arc.jsonl'}", "--max-items=9", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert report["tasks"]["tasks"]["arc"]["items"] == 9


def test_a_missing_harness_is_one_line(folder, tmp_path, monkeypatch):
    from taut_deploy.validate.tasks import harness_given

    monkeypatch.setattr(harness_given.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(CouldNotValidateError, match=r"pip install 'taut\[eval\]'"):
        validate(folder, tmp_path / "r", harness=("arc_easy",))


@pytest.fixture
def harness(monkeypatch):
    found = Harness({role: RECORDED[role] for role in ROLES})
    for name, module in found.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, HARNESS_MODEL, raising=False)
    monkeypatch.setattr("taut_deploy.validate.tasks.plan.require_harness", lambda: None)
    yield found
    sys.modules.pop(HARNESS_MODEL, None)  # it is a class of the recorded one's


def test_the_harness_hears_what_it_heard_when_it_was_recorded(folder, tmp_path, harness):
    """tests/e2e/test_validate_quick.py runs the real one; here stands what it asked and told."""
    report = validate(folder, tmp_path / "a", harness=("own",), max_items=8).report
    section = report["tasks"]["tasks"]["own"]
    right = [[row["acc"] == 1.0 for row in RECORDED[role]] for role in ROLES]
    both = sum(one and other for one, other in zip(*right, strict=True))
    assert (section["kind"], section["items"]) == ("harness", 8)
    assert section["counts"]["both"] == both, section["counts"]
    assert [run["limit"] for run in harness.runs] == [8, 8]
    assert all(run["log_samples"] and run["bootstrap_iters"] == 0 for run in harness.runs)


def test_the_harness_is_given_the_log_probabilities_that_were_recorded(folder, tmp_path, harness):
    heard = {}
    evaluate = harness.simple_evaluate

    def listened(model, **given):
        found = evaluate(model, **given)
        heard[ROLES[len(heard)]] = found["samples"]["own"]
        return found

    sys.modules["lm_eval.evaluator"].simple_evaluate = listened
    validate(folder, tmp_path / "a", harness=("own",))
    for role in ROLES:
        ours = [log for row in heard[role] for log, _ in row["filtered_resps"]]
        theirs = [log for row in RECORDED[role] for log, _ in row["filtered_resps"]]
        assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda row: row.update(doc_hash="another"), "item 0 was put to one model only"),
        (lambda row: row.update(metrics=["bleu"]), "not right or wrong"),
    ],
)
def test_samples_that_cannot_be_paired_are_refused(folder, tmp_path, harness, change, problem):
    harness.samples = json.loads(json.dumps(harness.samples))
    change(harness.samples["baseline"][0])
    with pytest.raises(CouldNotValidateError, match=problem):
        validate(folder, tmp_path / "a", harness=("own",))
    with pytest.raises(CouldNotValidateError, match="--lm-eval nowhere"):
        validate(folder, tmp_path / "b", harness=("nowhere",))


def test_a_document_that_the_harness_asks_twice_counts_once(folder, tmp_path, harness):
    harness.samples = json.loads(json.dumps(harness.samples))
    for role in ROLES:
        rows = harness.samples[role]
        rows.append(rows[0] | {"doc_id": len(rows)})
    sections = validate(folder, tmp_path / "a", harness=("own",)).report["tasks"]["tasks"]
    items = len(RECORDED["baseline"])
    assert (sections["own"]["items"], sections["own"]["items_available"]) == (items, items + 1)


BAD = {
    "an empty task file": (["--task", "EMPTY"], "", "the file is empty"),
    "no task file": (["--task", "nothing.jsonl"], "", "No such file"),
    "a limit misspelt": ([], "tasks: {any: {recovry: {min: 0.9}}}", "did you mean 'recovery'"),
    "a slice misspelt": ([], "slices: {struktured: {}}", "did you mean 'structured'"),
    "a section misspelt": ([], "slice: {chat: {}}", "did you mean 'slices'"),
    "another tokenizer": ([], "", "tokenizer differs"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_3(folder, tmp_path, capsys, name):
    more, policy, problem = BAD[name]
    (tmp_path / "EMPTY").write_text("\n\n")
    (tmp_path / "p.yaml").write_text(f"{LOOSE}{policy}\n")
    candidate = folder / "candidate"
    if name == "another tokenizer":
        candidate = tmp_path / "other"
        shutil.copytree(folder / "candidate", candidate)
        file = candidate / "tokenizer.json"
        file.write_text(file.read_text().replace('"w3"', '"w3x"'))
    more = [str(tmp_path / part) if part == "EMPTY" else part for part in more]
    given = ["validate", f"--baseline={folder / 'baseline'}", f"--candidate={candidate}"]
    given += [f"--policy={tmp_path / 'p.yaml'}", f"--text={folder / 'text.txt'}", "--no-served"]
    given += [f"--output={tmp_path / 'r'}", "--sequences=4", "--sequence-length=24", *more]
    assert main(given) == 3
    said = capsys.readouterr().err.strip().splitlines()
    assert problem in said[-1], said
    assert not any("Traceback" in line for line in said)
    assert not (tmp_path / "r" / "report.json").exists()
