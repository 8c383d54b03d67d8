"""The ``awq`` stage and data-free rounding in the pipeline: what they gain, what they refuse."""

from __future__ import annotations

import pytest
import torch
from tiny_models import job_for, recipe_data
from transformers import LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM
from validate_setup import VOCABULARY, write_tokenizer

from taut_deploy.compress import driver
from taut_deploy.errors import RecipeError


def with_awq(text, algorithm="rtn", **awq):
    data = recipe_data(text, algorithm=algorithm)
    return {**data, "stages": [{"method": "awq", **awq}, *data["stages"]]}


def errors_of(manifest):
    """Relative output errors of the first block's layers, by their last name."""
    return {
        layer["name"].split(".")[-1]: layer["relative_error"]
        for layer in manifest.layers
        if ".layers.0." in layer["name"]
    }


def test_scaled_inputs_lose_less_when_rounded(room, tmp_path):
    model = LlamaForCausalLM.from_pretrained(room / "model")
    for layer in model.model.layers:  # a few channels matter more, as in trained models
        layer.input_layernorm.weight.data[::16] *= 20
        layer.post_attention_layernorm.weight.data[::16] *= 20
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    plain = recipe_data(room / "text.txt", algorithm="rtn")
    before = driver.compress(job_for(tmp_path / "model", plain, tmp_path / "plain"))
    scaled = with_awq(room / "text.txt")
    after = driver.compress(job_for(tmp_path / "model", scaled, tmp_path / "scaled"))
    assert "awq+rtn" in {layer["method"] for layer in after.layers}
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        assert errors_of(after)[name] < 0.8 * errors_of(before)[name]


def test_layers_that_stay_dense_are_not_scaled(room, tmp_path):
    data = with_awq(room / "text.txt")
    data["stages"][1]["layers"] = ["*mlp*"]
    manifest = driver.compress(job_for(room / "model", data, tmp_path / "out"))
    assert {layer["method"] for layer in manifest.layers} == {"awq+rtn"}
    assert {layer["name"].split(".")[3] for layer in manifest.layers} == {"mlp"}


@pytest.mark.parametrize("run", [driver.plan, driver.compress])
def test_inputs_that_no_producer_scales_are_refused(run, room, tmp_path):
    """OLMo 2 normalises outputs: queries, keys and values read the residual stream itself."""
    model = tmp_path / "olmo2"
    config = Olmo2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    Olmo2ForCausalLM(config).to(torch.float32).save_pretrained(model)
    write_tokenizer(model)
    data = with_awq(room / "text.txt", layers=["*.q_proj", "*.k_proj", "*.v_proj"])
    message = r"stages\.awq: no input in model\.layers\.0 comes from a norm .*leave this stage out"
    with pytest.raises(RecipeError, match=message):
        run(job_for(model, data, tmp_path / "out"))


@pytest.mark.parametrize("scheme", ["FP8", "FP8-STATIC"])
def test_integer_algorithms_are_refused_for_floats(scheme, room, tmp_path):
    data = recipe_data(room / "text.txt", scheme=scheme, algorithm="hqq", group_size=None)
    message = f"quantize.algorithm: hqq rounds to integers, {scheme} are none; use rtn or gptq"
    with pytest.raises(RecipeError, match=message):
        driver.plan(job_for(room / "model", data, tmp_path / "out"))
