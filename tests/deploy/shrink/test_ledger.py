"""The ledger: read whole or refused, appended to, and never of another model."""

from __future__ import annotations

import json

import pytest
from shrink_room import MODEL, make_try

from taut_deploy.errors import OutputError
from taut_deploy.frontier.ledger import Ledger
from taut_deploy.models.store import ModelRecord


def test_what_is_appended_is_found_by_the_next_run(tmp_path):
    file = tmp_path / "ledger.jsonl"
    ledger = Ledger(file, MODEL)
    first, second = make_try("r"), make_try("s")
    ledger.append(first)
    ledger.append(second)
    again = Ledger(file, MODEL)
    assert again.judged(first.key) == first
    assert again.judged(second.key) == second
    assert again.judged(make_try("t").key) is None


def test_figures_are_found_whatever_the_policy(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl", MODEL)
    ledger.append(make_try("r", "one"))
    other = make_try("r", "two").key
    assert ledger.judged(other) is None
    assert ledger.measured(other) == make_try("r", "one")
    ledger.append(make_try("s", "one", outcome="REFUSED", metrics={}))
    assert ledger.measured(make_try("s", "two").key) is None


@pytest.mark.parametrize("kept", [0, 1, 40, -1])
def test_a_line_that_a_killed_run_left_is_dropped(tmp_path, kept):
    file = tmp_path / "ledger.jsonl"
    Ledger(file, MODEL).append(make_try("r"))
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:kept])  # never with its end of line
    ledger = Ledger(file, MODEL)
    ledger.append(make_try("s"))
    lines = [json.loads(line)["name"] for line in file.read_text().splitlines()]
    assert lines == ["r", "s"]
    assert file.read_bytes().startswith(whole)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "ledger.jsonl:2: not valid JSON"),
        ("[]", "ledger.jsonl:2: no line of 'taut shrink'"),
        ("{}", "ledger.jsonl:2: key: Field required"),
    ],
)
def test_a_damaged_line_is_refused_by_its_number(tmp_path, line, expected):
    file = tmp_path / "ledger.jsonl"
    Ledger(file, MODEL).append(make_try())
    file.write_text(f"{file.read_text()}{line}\n")
    with pytest.raises(OutputError, match=expected):
        Ledger(file, MODEL)


def test_the_ledger_of_another_model_is_refused(tmp_path):
    file = tmp_path / "ledger.jsonl"
    Ledger(file, MODEL).append(make_try())
    other = ModelRecord("other", "/o", "sha256:" + "b" * 64, 1, "local directory")
    expected = r"ledger.jsonl:1: is of another model \(sha256:aaaa.*than other.*another --output"
    with pytest.raises(OutputError, match=expected):
        Ledger(file, other)


def test_what_json_cannot_hold_is_not_written(tmp_path):
    file = tmp_path / "ledger.jsonl"
    with pytest.raises(OutputError, match=r"metrics.mean_kl.estimate of r is not a finite number"):
        Ledger(file, MODEL).append(make_try(metrics={"mean_kl": {"estimate": float("nan")}}))
    assert not file.exists()
