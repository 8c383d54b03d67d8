"""Learned rounding in the pipeline: it follows the original model's own hidden states."""

from __future__ import annotations

import pytest
import torch
from stood_for import dequantised_model, logits_of
from tiny_models import (
    job_for,
    pruned_data,
    recipe_data,
    write_llama,
)
from transformers import AutoModelForCausalLM
from validate_setup import write_text

from taut_deploy.compress import driver
from taut_deploy.compress.calibrate.calibration import make_calibration_set
from taut_deploy.compress.quantize.stage import quantized_format
from taut_deploy.errors import RecipeError
from taut_deploy.recipe import Quantize


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``model/`` (fp32, K 64 and 128) and ``text.txt``."""
    path = tmp_path_factory.mktemp("room")
    write_llama(path / "model", layers=3)
    write_text(path / "text.txt", 2000, seed=5)
    return path


def run(room, output, data):
    request = job_for(room / "model", data, output)
    return request, driver.compress(request)


def hidden_states(model, tokens):
    with torch.inference_mode():
        return model(tokens, output_hidden_states=True).hidden_states[1:-1]


def test_blocks_come_closer_to_the_original_than_by_gptq(room, tmp_path):
    """Every block, on the sequences that judge: the target is the original model's own stream."""
    text = room / "text.txt"
    base = AutoModelForCausalLM.from_pretrained(room / "model").eval()
    errors = {}
    for algorithm in ("gptq", "round"):
        steps = {"steps": 200} if algorithm == "round" else {}
        data = recipe_data(text, algorithm=algorithm, **steps)
        data["calibration"]["sequences"] = 48
        request, manifest = run(room, tmp_path / algorithm, data)
        judges = make_calibration_set(
            request.recipe.calibration, request.model, tmp_path / "cache"
        ).tokens[: 48 // 16]
        pairs = zip(
            hidden_states(dequantised_model(request), judges),
            hidden_states(base, judges),
            strict=True,
        )
        errors[algorithm] = [float((got - want).square().sum()) for got, want in pairs]
    assert {layer["method"] for layer in manifest.layers} == {"gptq+round"}
    assert len(errors["round"]) == 2
    for after, before in zip(errors["round"], errors["gptq"], strict=True):
        assert after < 0.95 * before


def test_pruned_weights_stay_zero(room, tmp_path):
    later = recipe_data(room / "text.txt", algorithm="round", symmetric=False, steps=20)["stages"]
    request, manifest = run(
        room, tmp_path / "out", pruned_data(room / "text.txt", *later, pattern="2:4")
    )
    model = dequantised_model(request)
    for layer in manifest.layers:
        runs = model.get_submodule(layer["name"]).weight.view(-1, 4)
        assert ((runs != 0).sum(1) <= 2).all(), layer["name"]


def test_the_plan_counts_the_second_stream(room, tmp_path):
    plans = {
        algorithm: driver.plan(
            job_for(
                room / "model", recipe_data(room / "text.txt", algorithm=algorithm), tmp_path / "o"
            )
        )
        for algorithm in ("gptq", "round")
    }
    stream = 6 * 32 * 64 * 4
    more = plans["round"].disk_bytes - plans["gptq"].disk_bytes
    assert more == 3 * stream


@pytest.mark.parametrize("scheme", ["W4A8", "FP8", "FP8-STATIC"])
def test_rounded_inputs_are_learned_with(scheme, tmp_path, room):
    """Closer to the original than GPTQ's codes, inputs rounded in both."""
    text, group = room / "text.txt", 32 if scheme == "W4A8" else None
    base = AutoModelForCausalLM.from_pretrained(room / "model").eval()
    errors = {}
    for algorithm in ("gptq", "round"):
        steps = {"steps": 100} if algorithm == "round" else {}
        data = recipe_data(text, scheme=scheme, algorithm=algorithm, group_size=group, **steps)
        data["calibration"]["sequences"] = 48
        request, manifest = run(room, tmp_path / algorithm, data)
        judges = make_calibration_set(
            request.recipe.calibration, request.model, tmp_path / "cache"
        ).tokens[: 48 // 16]
        got = AutoModelForCausalLM.from_pretrained(request.output).eval()
        pairs = zip(hidden_states(got, judges), hidden_states(base, judges), strict=True)
        errors[algorithm] = sum(float((one - want).square().sum()) for one, want in pairs)
    assert {layer["method"] for layer in manifest.layers} == {"gptq+round"}
    assert errors["round"] < 0.97 * errors["gptq"]


@pytest.mark.parametrize("scheme", ["NVFP4A16", "FP8-BLOCK", "FP8-TENSOR"])
def test_schemes_that_cannot_be_learned_are_refused(scheme, room):
    stage = Quantize(scheme=scheme, algorithm="round")
    with pytest.raises(RecipeError, match=f"round learns .* FP8 by channel, {scheme} is neither"):
        quantized_format(stage, {128}, torch.bfloat16)


@pytest.mark.parametrize("products", [True, False])
def test_models_in_16_bits_are_learned_in_either_dtype(products, room, tmp_path, monkeypatch):
    monkeypatch.setattr("taut_deploy.compress.job.has_products", lambda asked: products)
    model = write_llama(tmp_path / "model", dtype=torch.bfloat16, tie=True)
    data = recipe_data(room / "text.txt", algorithm="round", symmetric=False, steps=4)
    data["stages"].insert(0, {"method": "smooth"})
    manifest = driver.compress(job_for(model, data, tmp_path / "out"))
    assert {layer["method"] for layer in manifest.layers} <= {"gptq+round", "smooth+gptq+round"}
    base, got = (
        logits_of(AutoModelForCausalLM.from_pretrained(path).eval()).float()
        for path in (model, tmp_path / "out")
    )
    assert (got - base).norm() < 0.5 * base.norm()
