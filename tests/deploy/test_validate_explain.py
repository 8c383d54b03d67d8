"""``--explain`` says what a policy needs and runs nothing; ``--quick`` does less."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner
from validate_setup import write_model, write_text

from taut_deploy import cli
from taut_deploy.cli import app

POLICY = """
name: p
require: {perplexity_ratio: {max: 1000}}
tasks:
  arc: {file: arc.jsonl, recovery: {min: 0.98}}
  mmlu: {difference: {min: -0.01}}
slices:
  chat: {length_ratio: {max: 1.2}}
latency: {itl_p50_ratio_at_most: 1.05, required: false}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("explain")
    write_model(path / "baseline")
    write_text(path / "text.txt", 6000)
    rows = [{"prompt": f"w{i}", "choices": [" w1", " w2"], "answer": 0} for i in range(500)]
    (path / "arc.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "p.yaml").write_text(POLICY)
    return path


def call(*arguments):
    result = CliRunner().invoke(app, ["validate", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_it_prints_items_looks_and_power_without_a_model(folder):
    found = call("--policy", folder / "p.yaml", "--explain", "--max-sequences", 128)
    assert found["accuracy"]["sequences"] == [32, 64, 128]
    assert found["tasks"]["arc"]["looks"] == [200, 400, 500]
    # 7.849 times flips over the square of half of two percent.
    power = found["tasks"]["arc"]["items_for_80_percent_power"]
    assert power == {"3% flips": 2355, "5% flips": 3925, "10% flips": 7849}
    assert found["tasks"]["mmlu"]["kind"].startswith("no source")
    assert found["slices"]["chat"]["prompts"] == 20
    assert found["latency"]["limits"][0] == "itl_p50_ratio max 1.05"
    assert found["tokens_per_model"] > 128 * 512
    assert "seconds" not in found


def test_with_a_baseline_it_measures_how_long_that_takes(folder):
    found = call("--policy", folder / "p.yaml", "--explain", "--baseline", folder / "baseline")
    seconds = 2 * found["tokens_per_model"] / found["tokens_per_second"]
    assert found["seconds"] == pytest.approx(seconds, abs=1)


def test_a_wrong_policy_is_said_by_explain_too(folder, tmp_path, monkeypatch, capfd):
    (tmp_path / "p.yaml").write_text(POLICY.replace("file: arc", "fle: arc"))
    monkeypatch.setattr(
        sys, "argv", ["taut", "validate", "--policy", str(tmp_path / "p.yaml"), "--explain"]
    )
    assert cli.main() == 3
    assert "tasks.arc.fle: unknown key; did you mean 'file'?" in capfd.readouterr().err


def test_a_run_without_its_models_is_a_mistake_of_one_line(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["taut", "validate", "--policy", "balanced"])
    assert cli.main() == 3
    error = capfd.readouterr().err
    assert "--baseline" in error
    assert error.count("\n") == 1


def test_quick_asks_less_of_everything(folder, tmp_path):
    arguments = ["--baseline", folder / "baseline", "--candidate", folder / "baseline"]
    arguments += ["--text", folder / "text.txt", "--policy", "balanced", "--quick"]
    arguments += ["--sequence-length", 64, "--task", folder / "arc.jsonl"]
    call(*arguments, "--output", tmp_path / "r")
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert (report["text"]["sequences"], report["text"]["sequence_length"]) == (16, 64)
    assert report["tasks"]["tasks"]["arc"]["items"] == 200
    assert report["serving"]["compared"] is False
    assert report["noise_floor"].endswith("2 sequences")
