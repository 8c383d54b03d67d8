"""``taut shrink`` from model to verdict: the order, the stop, the ledger, another policy."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from shrink_room import write_policy
from tiny_models import recipe_data, write_recipe

from taut_deploy.checkpoint import read_manifest, verify
from taut_deploy.compress import driver
from taut_deploy.compress.mixed.scores import Scoring
from taut_deploy.frontier import walk
from taut_deploy.models.directory import weight_files
from taut_deploy.models.store import describe_directory
from taut_deploy.recipe import load_recipe
from taut_deploy.verdict_record import require_verdict


def outcomes(room, output: str) -> list[tuple[str, str]]:
    return [(entry["name"], entry["outcome"]) for entry in room.ledger(output)]


def test_the_smallest_that_passes_is_found_and_the_search_stops(room, run):
    code, out, err = run(*room.command("middling", "found"))
    assert code == 0, err
    assert outcomes(room, "found") == [("w2", "FAIL"), ("w4", "FAIL"), ("w8", "PASS")]
    (left,) = [name for name in room.tries("found") if not name.startswith(".")]
    checkpoint = room.path / "found" / "tries" / left
    assert f"taut worker {checkpoint}" in err
    manifest = verify(checkpoint)
    assert manifest.recipe["name"] == "w8"
    assert manifest.validation is not None and manifest.validation["verdict"] == "PASS"
    assert out.splitlines()[0] == "# The smallest model that passes middling"
    assert re.search(
        r"\| w8 \| .* MB \| 0\.00\d\d \[.*\] \| 1\.\d+ \[.*\] \| PASS \| \d+ s \|", out
    )


def test_a_loose_policy_stops_at_the_first_and_says_what_was_not_reached(room, run):
    code, out, _ = run(*room.command("loose", "first"))
    assert code == 0
    assert outcomes(room, "first") == [("w2", "PASS")]
    assert "- w4: not reached" in out and "- w8: not reached" in out


def test_nothing_passes_and_the_nearest_miss_is_named_with_its_bound(room, run):
    code, out, err = run(*room.command("tight", "none"))
    assert code == 1
    assert [outcome for _, outcome in outcomes(room, "none")] == ["FAIL"] * 3
    last = err.splitlines()[-1]
    assert last.startswith("taut: nothing passes tight.yaml: nearest is w8 (")
    assert "missed mean_kl max 1e-07: the whole interval" in last
    assert "None passes; the nearest miss is w8" in out
    assert [name for name in room.tries("none") if not name.startswith(".")] == []


def test_checkpoints_that_did_not_pass_are_kept_where_that_is_asked_for(room, run):
    code, _, _ = run(*room.command("tight", "kept", "--keep-all", recipes=("w2", "w4")))
    assert code == 1
    kept = [name for name in room.tries("kept") if not name.startswith(".")]
    assert [verify(room.path / "kept" / "tries" / name).recipe["name"] for name in kept] == [
        "w2",
        "w4",
    ]


def test_a_second_run_repeats_nothing(room, run, monkeypatch):
    run(*room.command("middling", "twice"))
    before = (room.path / "twice" / "ledger.jsonl").read_bytes()
    first = (room.path / "twice" / "frontier.svg").read_bytes()

    def never(*_):
        raise AssertionError("it was done already")

    monkeypatch.setattr(walk.pipeline, "compress", never)
    monkeypatch.setattr(walk, "run_validation", never)
    code, _, _ = run(*room.command("middling", "twice"))
    assert code == 0
    assert (room.path / "twice" / "ledger.jsonl").read_bytes() == before
    assert (room.path / "twice" / "frontier.svg").read_bytes() == first


@pytest.mark.parametrize("lost", [True, False])
def test_a_found_checkpoint_whose_weights_changed_is_not_found_again(room, run, lost):
    output = f"changed-{lost}"
    code, _, _ = run(*room.command("loose", output))
    assert code == 0
    (place,) = [name for name in room.tries(output) if not name.startswith(".")]
    weights = next(iter(weight_files(room.path / output / "tries" / place)))
    right = weights.read_bytes()
    weights.unlink()
    if not lost:
        weights.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    code, out, err = run(*room.command("loose", output))
    assert (code, out) == (2, "")
    (line,) = err.strip().splitlines()
    assert str(weights) in line
    assert f"remove {weights.parent} and repeat the command" in line
    shutil.rmtree(weights.parent)
    assert run(*room.command("loose", output))[0] == 0
    assert weights.read_bytes() == right


def test_another_policy_judges_the_figures_that_are_there(room, run, monkeypatch):
    run(*room.command("tight", "anew", "--keep-all"))
    measured = {entry["name"]: entry["metrics"]["mean_kl"] for entry in room.ledger("anew")}

    def never(*_):
        raise AssertionError("it was measured already")

    monkeypatch.setattr(walk.pipeline, "compress", never)
    monkeypatch.setattr(walk, "run_validation", never)
    code, out, _ = run(*room.command("middling", "anew"))
    assert code == 0
    added = room.ledger("anew")[3:]
    # By hand: the whole interval against the bound of 0.01.
    by_hand = ["PASS" if measured[name]["high"] <= 0.01 else "FAIL" for name in ("w2", "w4", "w8")]
    assert [entry["outcome"] for entry in added] == by_hand == ["FAIL", "FAIL", "PASS"]
    assert all(entry["rejudged"] for entry in added)
    assert "PASS, judged anew" in out


def test_a_removed_checkpoint_that_passes_another_policy_is_made_again_to_the_same_bytes(
    room, run, monkeypatch
):
    run(*room.command("tight", "again"))
    before = {entry["name"]: entry["checkpoint_digest"] for entry in room.ledger("again")}
    made = []
    compress = walk.pipeline.compress
    monkeypatch.setattr(
        walk.pipeline, "compress", lambda job, told: made.append(job) or compress(job, told)
    )

    def never(*_):
        raise AssertionError("it was measured already")

    monkeypatch.setattr(walk, "run_validation", never)
    code, _, _ = run(*room.command("middling", "again"))
    assert code == 0
    assert [job.recipe.name for job in made] == ["w8"]
    found = verify(made[0].output)
    assert found.digest == before["w8"]
    assert found.validation is not None
    assert found.validation["verdict"] == "PASS"
    assert found.validation["policy"] == "middling.yaml"
    said = require_verdict(made[0].output, found, "PASS", None)
    assert said == "verdict PASS under policy middling.yaml"


def test_other_data_are_measured_anew(room, run):
    run(*room.command("tight", "data", recipes=("w4",)))
    code, _, _ = run(*room.command("tight", "data", "--seed", "1", recipes=("w4",)))
    assert code == 1
    first, second = room.ledger("data")
    assert first["key"]["data"] != second["key"]["data"]
    assert not second["rejudged"]


def test_an_undecided_candidate_does_not_pass(room, run):
    run(*room.command("tight", "open", recipes=("w4",)))
    kl = room.ledger("open")[0]["metrics"]["mean_kl"]
    # A bound inside the interval of w4.
    write_policy(room.path / "open.yaml", "open", mean_kl={"max": (kl["low"] + kl["high"]) / 2})
    code, _, err = run(*room.command("open", "open", recipes=("w4", "w8")))
    assert code == 0
    assert outcomes(room, "open")[1:] == [("w4", "INCONCLUSIVE"), ("w8", "PASS")]
    assert "w4: INCONCLUSIVE" in err
    code, _, err = run(*room.command("open", "open", recipes=("w4",)))
    assert code == 1
    assert "nearest is w4" in err.splitlines()[-1]
    assert "contains the limit" in err.splitlines()[-1]


def test_mixtures_share_tokens_and_scores_and_have_the_bytes_of_a_plain_run(
    room, run, monkeypatch, tmp_path
):
    scored = []
    score = Scoring.run
    monkeypatch.setattr(Scoring, "run", lambda self, told: scored.append(1) or score(self, told))
    bits = ("--target-bits", "5,6.5", "--keep-all")
    code, _, err = run(*room.command("tight", "mixed", *bits, recipes=("mix",)))
    assert code == 1, err
    assert scored == [1]
    names = [entry["name"] for entry in room.ledger("mixed")]
    assert names == ["mix, 5 bits", "mix, 6.5 bits"]
    plain = ("compress", "model", "--recipe", "mix.yaml", "--target-bits", "6.5")
    assert run(*plain, "--output", str(tmp_path / "plain"))[0] == 0
    assert scored == [1, 1]
    assert room.ledger("mixed")[1]["checkpoint_digest"] == read_manifest(tmp_path / "plain").digest


def test_a_candidate_that_cannot_be_made_is_refused_and_the_next_is_tried(room, run, monkeypatch):
    compress = walk.pipeline.compress

    def broken(job, told):
        if job.recipe.name == "w2":
            raise walk.ModelError("w2: its input overflows")
        return compress(job, told)

    monkeypatch.setattr(walk.pipeline, "compress", broken)
    code, out, err = run(*room.command("middling", "refused", recipes=("w2", "w8")))
    assert code == 0
    assert outcomes(room, "refused") == [("w2", "REFUSED"), ("w8", "PASS")]
    assert "taut: w2: refused: w2: its input overflows" in err
    assert "refused: w2: its input overflows" in out


def test_the_time_that_is_given_is_kept_and_the_next_run_goes_on(room, run, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(walk.time, "monotonic", lambda: clock[0])
    compress = walk.pipeline.compress

    def slow(job, told):
        manifest = compress(job, told)
        clock[0] += 40.0
        return manifest

    monkeypatch.setattr(walk.pipeline, "compress", slow)
    # After w2 40 of 60 seconds are gone, after the compression of w4 80: its comparison is cut off.
    code, out, err = run(*room.command("middling", "budget", "--budget-minutes", "1"))
    assert code == 3
    assert outcomes(room, "budget") == [("w2", "FAIL")]
    assert err.splitlines()[-1].startswith("taut: --budget-minutes: the time is used up")
    assert "- w8: not reached" in out
    made = []
    monkeypatch.setattr(
        walk.pipeline, "compress", lambda job, *told: made.append(job) or compress(job, *told)
    )
    code, _, _ = run(*room.command("middling", "budget"))
    assert code == 0
    assert outcomes(room, "budget") == [("w2", "FAIL"), ("w4", "FAIL"), ("w8", "PASS")]
    # The checkpoint of w4 was finished: it is found, and its time read from its log.
    assert [job.recipe.name for job in made] == ["w4", "w8"]


def test_a_recipe_of_the_whole_model_is_tried_and_found_again_where_its_comparison_was_cut_off(
    room, run, monkeypatch
):
    calibration = recipe_data(room.path / "calibration.txt")["calibration"]
    stages = [{"method": "slim", "ffn": 0.5}]
    write_recipe(
        room.path / "slim.yaml", {"name": "slim", "calibration": calibration, "stages": stages}
    )
    compare = walk.run_validation

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(walk, "run_validation", interrupted)
    assert run(*room.command("tight", "slim", recipes=("slim",)))[0] == 130
    monkeypatch.setattr(walk, "run_validation", compare)
    code, _, err = run(*room.command("tight", "slim", "--keep-all", recipes=("slim",)))
    assert code == 1
    assert outcomes(room, "slim") == [("slim", "FAIL")]
    assert "cutting" not in err and "slim: step" not in err
    (left,) = [name for name in room.tries("slim") if not name.startswith(".")]
    assert verify(room.path / "slim" / "tries" / left).recipe["name"] == "slim"


def test_the_json_has_what_the_table_has(room, run):
    code, out, err = run(*room.command("middling", "json", "--json"))
    assert (code, err) == (0, f"taut: serve it: taut worker {json.loads(out)['checkpoint']}\n")
    found = json.loads(out)
    assert (found["schema"], found["status"]) == ("taut-frontier", "found")
    assert [entry["name"] for entry in found["tries"]] == ["w2", "w4", "w8"]
    assert found == json.loads((room.path / "json" / "frontier.json").read_text())
    sizes = [entry["bytes"] for entry in found["tries"]]
    assert sizes == sorted(sizes)
    drawn = (room.path / "json" / "frontier.svg").read_text()
    assert all(f">{word}<" in drawn for word in ("w2", "w8", "PASS", "FAIL", "weights, MB"))


@pytest.mark.parametrize("name", ["w2", "w8"])
def test_predicted_sizes_are_those_of_the_files(room, run, name, tmp_path):
    run(*room.command("tight", f"size-{name}", recipes=(name,)))
    (entry,) = room.ledger(f"size-{name}")
    record = describe_directory(room.path / "model")
    job = driver.CompressionJob(
        record, load_recipe(str(room.path / f"{name}.yaml")), tmp_path / "out", tmp_path
    )
    driver.compress(job)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert entry["bytes"] == sum(file.stat().st_size for file in files)
    # The header of the base model's file is counted, those of the checkpoint are not.
    headers = sum(_header_bytes(file) for file in files)
    base = _header_bytes(room.path / "model" / "model.safetensors")
    assert entry["predicted_bytes"] == entry["bytes"] - headers + base


def _header_bytes(file: Path) -> int:
    with file.open("rb") as handle:
        return 8 + int.from_bytes(handle.read(8), "little")
