"""A plan says no wherever the run would: tensors absent, unknown, of other shapes or not finite."""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, job_for, recipe_data, write_calibration_text, write_llama

import taut_deploy
from taut_deploy.compress import driver, golden
from taut_deploy.errors import ModelError, OutputError
from taut_deploy.files import write_json_atomically
from taut_deploy.validate.checkpoint_source import CheckpointSource
from taut_deploy.validate.errors import CouldNotValidateError

UP = "model.layers.1.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Calibration text."""
    return write_calibration_text(tmp_path_factory.mktemp("room") / "text.txt")


def change_tensors(model, change):
    file = model / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return model


def put(name, value):
    return lambda tensors: tensors[name].flatten()[:1].fill_(value)


CHANGES = {
    "a layer is missing": (lambda t: t.pop(UP), f"1 tensors of LlamaForCausalLM .* is {UP}"),
    "the head of an untied model is missing": (
        lambda t: t.pop("lm_head.weight"),
        "1 tensors of LlamaForCausalLM are in no shard, the first is lm_head.weight",
    ),
    "the final norm is missing": (
        lambda t: t.pop("model.norm.weight"),
        "in no shard, the first is model.norm.weight",
    ),
    "another shape": (
        lambda t: t.update({UP: torch.ones(64, 64)}),
        rf"{UP}: stored shape \(64, 64\) does not match config.json's \(128, 64\)",
    ),
    "another shape outside the blocks": (
        lambda t: t.update({EMBEDDING: torch.ones(3, 64)}),
        rf"{EMBEDDING}: stored shape \(3, 64\) does not match",
    ),
    "a tensor too many": (
        lambda t: t.update({"model.layers.1.extra": torch.ones(4)}),
        "1 stored tensors have no place .* the first is model.layers.1.extra",
    ),
    "a block too many": (
        lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(64)}),
        "no place .* the first is model.layers.2.input_layernorm.weight",
    ),
    "int8 that nothing explains": (
        lambda t: t.update({UP: torch.ones(128, 64, dtype=torch.int8)}),
        f"{UP} is stored as I8, and config.json names no quantisation",
    ),
    "other names": (
        lambda t: [t.update({"base." + name: t.pop(name)}) for name in list(t)],
        "tensors of LlamaForCausalLM are in no shard.*stored is, for example, base.lm_head",
    ),
    **{
        f"{value} in {name}": (put(name, value), f"{name} holds NaN or infinity")
        for value in (float("nan"), float("inf"))
        for name in (UP, EMBEDDING, "model.norm.weight", "lm_head.weight")
    },
    "NaN in a block's norm": (
        put("model.layers.0.input_layernorm.weight", float("nan")),
        "model.layers.0.input_layernorm.weight holds NaN",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("action", ["plan", "compress"])
def test_broken_tensors_are_refused_before_anything_is_written(action, case, text, tmp_path):
    change, message = CHANGES[case]
    model = change_tensors(write_llama(tmp_path / "m"), change)
    with pytest.raises(ModelError, match=message) as refused:
        getattr(driver, action)(job_for(model, recipe_data(text), tmp_path / "out"))
    assert "\n" not in str(refused.value)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name and path.is_dir()]


def test_tables_that_every_architecture_computes_are_passed_over(text, tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    model = change_tensors(write_llama(tmp_path / "m"), lambda t: t.update({name: torch.ones(8)}))
    driver.compress(job_for(model, recipe_data(text), tmp_path / "out"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert name not in index["weight_map"]


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_that_is_tied_and_stored_must_be_the_embedding(equal, text, tmp_path):
    def change(tensors):
        tensors["lm_head.weight"] = tensors[EMBEDDING] + (0 if equal else 1)

    model = change_tensors(write_llama(tmp_path / "m", tie=True), change)
    if equal:
        driver.plan(job_for(model, recipe_data(text), tmp_path / "out"))
        return
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from .*set tie_word_embeddings"):
        driver.plan(job_for(model, recipe_data(text), tmp_path / "out"))


def test_an_index_that_contradicts_its_shards_is_refused(text, tmp_path):
    model = write_llama(tmp_path / "m", shard_bytes=90_000)
    index = model / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    shards = sorted(set(names.values()))
    wrong = next(shard for shard in shards if shard != names[UP])
    edit_json(index, weight_map=names | {UP: wrong})
    with pytest.raises(ModelError, match=rf"{wrong}: the index says that it holds {UP}"):
        driver.plan(job_for(model, recipe_data(text), tmp_path / "out"))
    edit_json(index, weight_map=names)
    tensors = load_file(model / wrong)
    save_file({**tensors, UP: torch.ones(128, 64)}, model / wrong, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"{UP} is in .* too"):
        driver.plan(job_for(model, recipe_data(text), tmp_path / "out"))


def test_logits_that_are_not_finite_make_no_golden_prompt(tmp_path):
    model = write_llama(tmp_path / "m", layers=1)
    logits = [torch.tensor([float("inf"), 1.0, 2.0])] * len(golden.PROMPTS)
    with pytest.raises(ModelError, match="NaN or infinite logits for the readiness prompt"):
        golden.choose_golden(logits, model)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_lacks_is_never_written(value, tmp_path):
    with pytest.raises(OutputError, match=r"a\.json: golden\.1\.margin is not a finite number"):
        write_json_atomically(tmp_path / "a.json", {"golden": [0.5, {"margin": value}]})
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_that_is_no_json_is_refused(text, tmp_path):
    model = write_llama(tmp_path / "m", layers=1)
    edit_json(model / "config.json", time_step_limit=[0.0, float("inf")])
    with pytest.raises(ModelError, match=r"config\.json: time_step_limit\.1 is NaN or infinity"):
        driver.plan(job_for(model, recipe_data(text), tmp_path / "out"))


def test_every_json_that_deploy_writes_is_strict():
    room = Path(taut_deploy.__file__).parent
    calls = [
        (path.relative_to(room).as_posix(), call)
        for path in room.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in {"json.dumps", "json.dump"}
    ]
    assert len(calls) > 10
    # A hash and a check of what came in: nothing is written. A worker's arguments hold no floats.
    exempt = {"files.py": 1, "bench/mock_strict.py": 1, "worker/command.py": 2}
    loose = Counter(
        path for path, call in calls if "allow_nan" not in {word.arg for word in call.keywords}
    )
    assert loose == exempt


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(EMBEDDING, float("nan")), f"{EMBEDDING} holds NaN"),
        (
            lambda t: t.update({"model.layers.1.extra": torch.ones(4)}),
            "1 unexpected tensors, the first is model.layers.1.extra",
        ),
        (lambda t: t.pop("lm_head.weight"), "1 missing tensors, the first is lm_head.weight"),
    ],
)
def test_validate_reads_no_broken_model(change, message, tmp_path):
    model = change_tensors(write_llama(tmp_path / "m"), change)
    with pytest.raises(CouldNotValidateError, match=message):
        CheckpointSource(model, "candidate", "cpu")


def test_validate_follows_no_shard_out_of_the_directory(tmp_path):
    model = write_llama(tmp_path / "m", shard_bytes=60_000)
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {UP: "../elsewhere/model.safetensors"}})
    )
    with pytest.raises(CouldNotValidateError, match=r"is not a \.safetensors file of this"):
        CheckpointSource(model, "candidate", "cpu")
