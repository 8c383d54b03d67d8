"""The ``rotate`` stage in the pipeline: the same model in another basis, then compressed."""

from __future__ import annotations

import json

import pytest
import torch
from stood_for import dequantised_model, logits_of, stored
from tiny_models import job_for, recipe_data, write_calibration_text, write_llama
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
)
from validate_setup import VOCABULARY, write_tokenizer

from taut_deploy.checkpoint import verify
from taut_deploy.compress import pipeline
from taut_deploy.compress.equalize.rotate_model import rotate_model
from taut_deploy.compress.pipeline_plan import plan
from taut_deploy.errors import RecipeError
from taut_deploy.models.store import describe_directory
from taut_deploy.recipe import Rotate

SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_calibration_text(tmp_path_factory.mktemp("room") / "text.txt")


def rotated(text, **quantize):
    data = recipe_data(text, **quantize)
    return {**data, "stages": [{"method": "rotate"}, *data["stages"]]}


def write_family(path, family):
    """A random model of a family, fp32, its norms uneven."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES)
    config.initializer_range = 0.1
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = torch.empty_like(parameter).uniform_(0.5, 2.0)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def logits(path):
    return logits_of(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())


@pytest.mark.parametrize("tie", [False, True])
def test_the_turned_model_is_another_with_the_same_logits(tie, text, tmp_path):
    model = write_llama(tmp_path / "model", tie=tie)
    request = job_for(model, rotated(text), tmp_path / "out")
    rotate_model(request, Rotate(), tmp_path / "turned", lambda done, total, what: None)
    torch.testing.assert_close(logits(tmp_path / "turned"), logits(model), rtol=1e-4, atol=1e-4)
    before, after = stored(describe_stored(tmp_path / "again", model)), stored(tmp_path / "turned")
    for name, value in before.items():
        if name.endswith("norm.weight"):
            assert torch.equal(after[name], torch.ones_like(value)), name
        else:
            assert (after[name] - value).norm() > 0.5 * value.norm(), name
    assert set(after) - set(before) == ({"lm_head.weight"} if tie else set())
    assert (
        json.loads((tmp_path / "turned" / "config.json").read_text())["tie_word_embeddings"]
        is False
    )


def describe_stored(path, model):
    """The base model with an index, as :func:`stored` reads it."""
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(path, max_shard_size=20_000)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tie", [False, True])
def test_transformers_loads_what_was_turned_and_rounded(tie, dtype, text, tmp_path):
    model = write_llama(tmp_path / "model", tie=tie, dtype=dtype)
    data = rotated(text, scheme="W8A16", algorithm="rtn")
    request = job_for(model, data, tmp_path / "out")
    foreseen = plan(request)
    manifest = pipeline.compress(request)
    assert verify(tmp_path / "out") == manifest
    assert pipeline.compress(request) == manifest, "finished, so nothing is done again"
    assert manifest.base_model["digest"] == describe_directory(model).digest
    assert [one["method"] for one in manifest.recipe["results"]] == ["rotate", "blocks"]
    change = (logits(tmp_path / "out") - logits(model)).norm() / logits(model).norm()
    assert 0 < change < (0.02 if dtype is torch.float32 else 0.05)
    grown = len(VOCABULARY) * 64 * dtype.itemsize if tie else 0
    assert foreseen.whole_model == (
        "rotate: the residual stream and the heads' values"
        + (f"; embeddings and head are untied, {grown / 1e6:.1f} MB more" if tie else ""),
    )
    actual = sum(p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors"))
    assert foreseen.bytes_after == pytest.approx(actual, rel=0.15), "headers are large here"


def test_readers_agree_on_a_turned_checkpoint(text, tmp_path):
    request = job_for(write_llama(tmp_path / "model"), rotated(text), tmp_path / "out")
    pipeline.compress(request)
    ours = logits_of(dequantised_model(request))
    theirs = logits(tmp_path / "out")
    base = logits(tmp_path / "model")
    assert (theirs - ours).norm() < 0.02 * (ours - base).norm()


def test_channels_that_stick_out_cost_less_when_turned(text, tmp_path):
    model = write_llama(tmp_path / "plain")
    loud = LlamaForCausalLM.from_pretrained(model)
    for layer in loud.model.layers:
        layer.input_layernorm.weight.data[::16] *= 20
        for name in ("q_proj", "k_proj", "v_proj"):
            layer.self_attn.get_submodule(name).weight.data[:, ::16] /= 20
        layer.post_attention_layernorm.weight.data[::16] *= 20
        for name in ("gate_proj", "up_proj"):
            layer.mlp.get_submodule(name).weight.data[:, ::16] /= 20
    loud.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    errors = []
    for name, data in (
        ("plain-out", recipe_data(text, scheme="W8A8", group_size=None, algorithm="rtn")),
        ("turned-out", rotated(text, scheme="W8A8", group_size=None, algorithm="rtn")),
    ):
        manifest = pipeline.compress(job_for(tmp_path / "model", data, tmp_path / name))
        errors.append({one["name"]: one["relative_error"] for one in manifest.layers})
    before, after = errors
    for name in before:
        if name.rpartition(".")[2] in {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}:
            assert after[name] < 0.5 * before[name], name


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma", "phi3"])
def test_families_of_scaling_norms_are_turned(family, text, tmp_path):
    model = write_family(tmp_path / "model", family)
    request = job_for(model, rotated(text), tmp_path / "out")
    rotate_model(request, Rotate(seed=3), tmp_path / "turned", lambda done, total, what: None)
    torch.testing.assert_close(logits(tmp_path / "turned"), logits(model), rtol=1e-3, atol=1e-3)


REFUSED = {
    "gemma2": r"model\.layers\.0: turning the residual stream changes its output",
    "olmo2": r"model\.layers\.0: .*reads neither a norm nor a head's values",
    "cohere": r"model\.layers\.0: ",
    "nemotron": r"model\.layers\.0: .*is not a scaling RMSNorm",
    "gpt_neox": r"gpt_neox\.layers\.0: ",
    "mixtral": r"model\.layers\.0: ",
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_turned_is_refused_in_the_plan(family, text, tmp_path):
    model = write_family(tmp_path / "model", family)
    message = rf"stages\.rotate: {REFUSED[family]}.*this architecture cannot be rotated, leave"
    with pytest.raises(RecipeError, match=message) as refused:
        plan(job_for(model, rotated(text), tmp_path / "out"))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_killed_rotation_goes_on_to_the_same_bytes(text, tmp_path):
    model = write_llama(tmp_path / "model")
    request = job_for(model, rotated(text), tmp_path / "out")

    class KilledError(Exception):
        pass

    def die_at_the_second_block(done, total, what):
        if done == 1:
            raise KilledError

    for name, progress in (("whole", None), ("cut", die_at_the_second_block)):
        if progress is not None:
            with pytest.raises(KilledError):
                rotate_model(request, Rotate(), tmp_path / name, progress)
            assert not (tmp_path / name).exists()
        told: list[str] = []
        rotate_model(
            request, Rotate(), tmp_path / name, lambda _d, _t, what, to=told: to.append(what)
        )
        assert len(told) == (2 if progress is None else 1), (
            "blocks that were done are not done again"
        )
    assert (
        describe_directory(tmp_path / "whole").digest == describe_directory(tmp_path / "cut").digest
    )
