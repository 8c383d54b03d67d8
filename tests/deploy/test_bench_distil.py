"""``taut bench distil``: students are what they say, figures are the models', texts stay apart."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import write_llama
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner
from validate_setup import WORDS, write_text

from taut_deploy.bench import distil_texts
from taut_deploy.bench.distil_texts import PASSAGE, parse_text_sets, require_apart
from taut_deploy.cli import app
from taut_deploy.errors import MeasureError, RecipeError

LENGTH, JUDGED = 32, 6
TOKENS = 15 * 8 * LENGTH
MATRICES = "model.layers.0.mlp.up_proj.weight"


def arguments(room, *more: str) -> list[str]:
    plain = [
        *("bench", "distil", str(room / "model"), "--text", str(room / "judged.txt")),
        *("--calibration", str(room / "other.txt"), "--calibration-sequences", "16"),
        *("--sequences", str(JUDGED), "--sequence-length", str(LENGTH), "--batch-size", "8"),
        *("--micro-batch", "8", "--self-sequences", "12", "--output", str(room / "out"), "--json"),
    ]
    return [*plain, *more]


def run(*given: str):
    return CliRunner().invoke(app, list(given), catch_exceptions=False)


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A model, the text it is judged on, another one, and the rows of a whole run."""
    path = tmp_path_factory.mktemp("bench-distil")
    write_llama(path / "model", layers=4)
    write_text(path / "judged.txt", 400, seed=3)
    write_text(path / "other.txt", 2400, seed=5)
    sets = [f"a={path / 'other.txt'},self", f"b={path / 'other.txt'}"]
    budget = ["--tokens", str(TOKENS)]
    answer = run(*arguments(path, "--train", sets[0], "--train", sets[1], *budget))
    assert answer.exit_code == 0, answer.output
    (path / "rows.json").write_text(answer.stdout)
    return path


@pytest.fixture(scope="module")
def rows(room) -> list[dict]:
    return json.loads((room / "rows.json").read_text())


def test_every_student_is_judged_before_and_after_on_each_set(rows):
    students = {"w4", "sparse50", "sparse24", "lowrank", "ffn", "depth"}
    assert {(row["student"], row["text"]) for row in rows} == {
        (student, text) for student in students for text in "ab"
    }
    assert all(row["tokens"] == TOKENS for row in rows)


def test_training_by_the_base_wins_back_part_of_a_large_loss(rows):
    damaged = [row for row in rows if row["one_shot"]["mean_kl"] > 0.2]
    assert len(damaged) >= 8
    for row in damaged:
        assert row["distilled"]["mean_kl"] < row["one_shot"]["mean_kl"], row


def test_one_shot_figures_are_those_of_the_student_on_disk(room, rows):
    ids = AutoTokenizer.from_pretrained(room / "model")((room / "judged.txt").read_text())
    tokens = torch.tensor(ids["input_ids"][: JUDGED * LENGTH]).view(JUDGED, LENGTH)

    def log_probabilities(directory):
        model = AutoModelForCausalLM.from_pretrained(directory).eval()
        with torch.no_grad():
            return model(tokens).logits[:, :-1].double().log_softmax(-1)

    base = log_probabilities(room / "model")
    student = log_probabilities(room / "out" / "students" / "sparse24")
    true = tokens[:, 1:, None]
    ratio = math.exp(float((base.gather(-1, true) - student.gather(-1, true)).mean()))
    kl = float((base.exp() * (base - student)).sum(-1).mean())
    row = next(row for row in rows if row["student"] == "sparse24")
    assert row["one_shot"]["perplexity_ratio"] == pytest.approx(ratio, rel=1e-4)
    assert row["one_shot"]["mean_kl"] == pytest.approx(kl, rel=1e-3)


def test_students_are_what_they_are_called(room):
    def weight(student: str, name: str = MATRICES) -> torch.Tensor:
        shards = (room / "out" / "students" / student).glob("*.safetensors")
        return next(found[name] for shard in shards if name in (found := load_file(shard)))

    half = weight("sparse50")
    assert float((half == 0).float().mean()) == pytest.approx(0.5, abs=0.01)
    runs = weight("sparse24").view(-1, 4)
    assert bool(((runs != 0).sum(1) == 2).all())
    # 80 % of 128 x 64 numbers are r (128 + 64) - r² at 44.4, 40 in whole eights.
    assert weight("lowrank", MATRICES.replace("weight", "weight_v")).shape == (40, 64)


def test_rows_on_disk_are_not_measured_again(room, rows):
    other = str(room / "other.txt")
    given = arguments(room, "--train", f"a={other},self", "--train", f"b={other}")
    again = run(*given, "--tokens", str(TOKENS))
    assert json.loads(again.stdout) == rows  # seconds included
    assert len((room / "out" / "distil.jsonl").read_text().splitlines()) == len(rows)
    table = (room / "out" / "distil.md").read_text()
    assert table.count("\n| ") == len(rows) + 1
    assert "torch" in table
    assert "date" in table


def test_fitted_students_start_nearer_to_the_base(room, rows):
    given = arguments(room, "--train", f"e={room / 'other.txt'}", "--only", "w4,sparse24")
    folder = room / "fitted"
    more = ["--tokens", "256", "--fit-steps", "40", "--work", str(folder)]
    before = {row["student"]: row["one_shot"]["mean_kl"] for row in rows}
    for row in json.loads(run(*given, *more).stdout):
        assert row["one_shot"]["mean_kl"] < before[row["student"]]
    shards = (folder / "sparse24").glob("*.safetensors")
    weight = next(found[MATRICES] for one in shards if MATRICES in (found := load_file(one)))
    assert bool(((weight.view(-1, 4) != 0).sum(1) == 2).all())


def test_text_that_is_judged_is_not_trained_on(room):
    mixed = room / "mixed.txt"
    mixed.write_text((room / "other.txt").read_text() + (room / "judged.txt").read_text())
    with pytest.raises(RecipeError, match=r"--train: .*mixed.txt holds tokens \d+ to \d+"):
        run(*arguments(room, "--train", f"c={mixed}", "--tokens", "256"))


def test_a_budget_is_given_once(room):
    train = ("--train", f"c={room / 'other.txt'}")
    for budget in ((), ("--tokens", "256", "--seconds", "5")):
        with pytest.raises(MeasureError, match="--seconds, --tokens: give one"):
            run(*arguments(room, *train, *budget))


def test_a_budget_in_seconds_becomes_tokens(room):
    given = arguments(room, "--train", f"d={room / 'other.txt'}", "--only", "ffn")
    row = json.loads(run(*given, "--seconds", "1").stdout)[0]
    assert row["tokens"] % (8 * LENGTH) == 0
    assert row["tokens"] > 8 * LENGTH


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (["corpus"], "write NAME=SOURCE"),
        (["a=,"], "write NAME=SOURCE"),
        (["a=corpus", "a=x.txt"], "another set has the name 'a'"),
        (["a=self"], "'self' goes on from another text"),
    ],
)
def test_wrong_sets_are_refused(entries, reason):
    with pytest.raises(RecipeError, match=reason):
        parse_text_sets(entries)


def test_unknown_students_are_refused(room):
    with pytest.raises(RecipeError, match="--only: no student is called 'w5'"):
        run(*arguments(room, "--train", "a=corpus", "--tokens", "9", "--only", "w4,w5"))


def test_shared_passages_are_found_at_any_place_and_shorter_ones_let_through():
    generator = np.random.default_rng(0)
    judged = generator.integers(0, 50, 5000)
    other = generator.integers(0, 50, 7000)
    require_apart("t", other, judged)
    for place in (0, 137, len(judged) - PASSAGE):
        for where in (0, 999, len(other) - PASSAGE):
            mixed = other.copy()
            mixed[where : where + PASSAGE] = judged[place : place + PASSAGE]
            with pytest.raises(RecipeError, match=f"tokens {place} to {place + PASSAGE}"):
                require_apart("t", mixed, judged)
            mixed[where + 3] = 51
            require_apart("t", mixed, judged)


def test_equal_hashes_of_different_passages_are_told_apart(monkeypatch):
    monkeypatch.setattr(
        distil_texts,
        "_passage_hashes",
        lambda ids: np.zeros(len(ids) - PASSAGE + 1, dtype=np.uint64),
    )
    require_apart("t", np.arange(100), np.arange(1, 101) * 2)


def test_the_base_goes_on_from_the_texts_of_the_set(room):
    written = np.load(next((room / "out" / "students").glob("self-a-*.npy")))
    assert written.shape == (12, LENGTH)
    words = (room / "other.txt").read_text().split()
    known = {tuple(words[i : i + 8]) for i in range(len(words))}
    for row in written:
        assert tuple(WORDS[i - 2] for i in row[:8].tolist()) in known
