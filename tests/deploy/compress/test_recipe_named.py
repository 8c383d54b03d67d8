"""What a recipe asks wrongly is told with its file and key, and the plan tells it already."""

from __future__ import annotations

import shutil

import pytest
import yaml
from tiny_models import edit_json, recipe_data, write_calibration_text, write_llama

QUANTIZE = {"method": "quantize", "scheme": "W4A16", "group_size": 32}


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    folder = tmp_path_factory.mktemp("room")
    write_calibration_text(folder / "text.txt")
    (folder / "blank.txt").write_text(" \n\t\n" * 4000)
    write_llama(folder / "model")
    return folder


CASES = {
    "a pattern that matches nothing": ({"ignore": ["*.q_prjo"]}, "ignore: '*.q_prjo' matches no"),
    "one stage twice": (
        {"stages": [QUANTIZE, QUANTIZE]},
        "stages: model.layers.0.self_attn.q_proj is stored twice, by stages.0 and stages.1; part",
    ),
    "a rank above the width": (
        {"stages": [{"method": "factorize", "rank": 70}]},
        "stages: model.layers.0.self_attn.q_proj [64, 64] cannot be LOWRANK: rank 70 is above",
    ),
    "experts of a model that has none": (
        {"stages": [{"method": "slim", "experts": 0.5}]},
        "stages.slim.experts: model_type 'llama' counts no experts; use stages.slim.ffn, stages.",
    ),
    "a text of white space": (
        {"calibration": {"path": "blank.txt"}},
        "calibration.path: {room}/blank.txt is empty, or holds nothing but white space",
    ),
    "sequences longer than the context": (
        {"calibration": {"sequence_length": 129}},
        "calibration.sequence_length: 129 is more than the 128 tokens of the model's context (max",
    ),
    "longer ones to train on": (
        {"stages": [QUANTIZE, {"method": "qat", "sequence_length": 200}]},
        "stages.1.sequence_length: 200 is more than the 128 tokens of the model's context (max_po",
    ),
    "too little text": (
        {"calibration": {"sequences": 4000}},
        "calibration: {room}/text.txt gives ",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("plan", [True, False])
def test_the_file_and_the_key_are_named(case, plan, room, call_taut, tmp_path, monkeypatch):
    changes, message = CASES[case]
    data = recipe_data(room / "text.txt")
    calibration = {**data["calibration"], **changes.get("calibration", {})}
    calibration["path"] = str(room / calibration["path"])
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({**data, **changes, "calibration": calibration}))
    monkeypatch.setenv("TAUT_HOME", str(tmp_path / "home"))
    options = ["--recipe", str(file), "--output", str(tmp_path / "out"), *["--plan"][: int(plan)]]
    code, _, said = call_taut("compress", str(room / "model"), *options)
    *_, told = said.strip().splitlines()
    assert (code, told[: len("taut: ")]) == (2, "taut: ")
    assert told.removeprefix("taut: ").startswith(f"{file}: {message.format(room=room)}")
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("taken", ["file", "directory", "link", "above"])
def test_a_plan_refuses_the_output_that_a_run_refuses(
    taken, room, call_taut, tmp_path, monkeypatch
):
    monkeypatch.setenv("TAUT_HOME", str(tmp_path / "home"))
    output, file = tmp_path / "out", tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(recipe_data(room / "text.txt")))
    if taken == "file":
        output.write_text("mine")
    elif taken == "directory":
        output.mkdir()
        (output / "mine.txt").write_text("mine")
    elif taken == "link":
        output.symlink_to(tmp_path)
    else:
        (tmp_path / "above").write_text("mine")
        output = tmp_path / "above" / "room" / "out"
    options = ["--recipe", str(file), "--output", str(output)]
    found = [
        call_taut("compress", str(room / "model"), *options, *more) for more in ([], ["--plan"])
    ]
    assert found[0] == found[1]
    code, _, said = found[0]
    assert code == 2
    assert said.startswith((f"taut: {output}: ", f"taut: cannot write {output}: a part of the"))
    assert said.count("\n") == 1


WRONG_CONFIGS = {
    "an unknown activation": ({"hidden_act": "nope"}, "transformers refuses the model (hidden_act"),
    "an unknown rotation": (
        {"rope_scaling": {"rope_type": "nope", "factor": 2.0}},
        "transformers refuses the model (rope_scaling.rope_type: 'nope')",
    ),
    "no family": ({"model_type": None}, "model_type: names no architecture; give the one that"),
    "a number in words": ({"num_hidden_layers": "2"}, "architecture 'llama' is not supported (Val"),
    "heads that do not divide": (
        {"num_attention_heads": 3},
        "architecture 'llama' is not supported (Class validation error for validator 'validate_",
    ),
}


@pytest.mark.parametrize("case", WRONG_CONFIGS)
def test_a_value_of_config_json_is_refused_by_file_and_field(case, room, tmp_path, call_taut):
    changes, message = WRONG_CONFIGS[case]
    model = shutil.copytree(room / "model", tmp_path / "model")
    edit_json(model / "config.json", **changes)
    code, _, said = call_taut("compress", str(model), "--plan")
    assert code == 2
    assert said.startswith(f"taut: {model / 'config.json'}: {message}")
    assert len(said.splitlines()) == 1


def test_a_size_of_zero_is_refused_in_one_line(room, tmp_path, call_taut):
    model = shutil.copytree(room / "model", tmp_path / "model")
    edit_json(model / "config.json", hidden_size=0)
    code, _, said = call_taut("compress", str(model), "--plan")
    assert code == 2
    (line,) = said.splitlines()
    assert "stored shape (62, 64) does not match config.json's (62, 0)" in line
