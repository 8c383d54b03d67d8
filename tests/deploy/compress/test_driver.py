"""The pipeline on a tiny model: the checkpoint, its readers, and what must be refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stood_for import dequantised_model, logits_of, round_as_compressed_tensors, stored
from tiny_models import (
    edit_json,
    job_for,
    pruned_data,
    recipe_data,
    w8a8_data,
    write_calibration_text,
    write_llama,
)
from transformers import AutoModelForCausalLM, AutoTokenizer
from validate_setup import MODULES

from taut_deploy.checkpoint import read_manifest, verify
from taut_deploy.compress import driver
from taut_deploy.compress.calibrate.calibration import make_calibration_set
from taut_deploy.compress.job import compute_dtype, fingerprint, open_stream
from taut_deploy.errors import RecipeError
from taut_deploy.files import VOLATILE_FILES

LINEARS = [
    f"model.layers.{i}.{'self_attn' if m[0] in 'qkvo' else 'mlp'}.{m}"
    for i in range(2)
    for m in MODULES
]


def job(room: Path, output: Path, **quantize):
    return job_for(room / "model", recipe_data(room / "text.txt", **quantize), output)


def calibration_tokens(request: driver.CompressionJob) -> torch.Tensor:
    """The tokens a job is calibrated on."""
    settings = request.recipe.calibration
    return make_calibration_set(settings, request.model, request.cache).tokens


CASES = {
    "w8a8 smoothed": lambda text: w8a8_data(text),
    "w8a8 gptq": lambda text: (
        w8a8_data(text) | {"stages": [{"method": "quantize", "scheme": "W8A8"}]}
    ),
    "w4a16 symmetric": lambda text: recipe_data(text),
    "w4a16 zero points": lambda text: recipe_data(text, symmetric=False),
    "w4a16 rtn g64": lambda text: recipe_data(text, group_size=64, algorithm="rtn"),
    "w4a16 g128 that does not divide": lambda text: recipe_data(text, group_size=128),
    "w4a16 smoothed": lambda text: (
        recipe_data(text, symmetric=False)
        | {
            "stages": [
                {"method": "smooth"},
                {"method": "quantize", "scheme": "W4A16", "group_size": 32},
            ]
        }
    ),
    "w4a16 per channel": lambda text: recipe_data(text, group_size="channel"),
    "w8a16": lambda text: recipe_data(text, scheme="W8A16", algorithm="rtn"),
    "w8a16 zero points": lambda text: recipe_data(text, scheme="W8A16", symmetric=False),
    "w3a16 zero points": lambda text: recipe_data(text, scheme="W3A16", symmetric=False),
    "w2a16": lambda text: recipe_data(text, scheme="W2A16"),
    "fp8": lambda text: recipe_data(text, scheme="FP8", group_size=None, algorithm="rtn"),
    "fp8 gptq": lambda text: recipe_data(text, scheme="FP8", group_size=None),
    "fp8 static": lambda text: recipe_data(text, scheme="FP8-STATIC", group_size=None),
    "fp8 tensor": lambda text: recipe_data(text, scheme="FP8-TENSOR", group_size=None),
    "w4a8": lambda text: recipe_data(text, scheme="W4A8"),
    "w4afp8": lambda text: recipe_data(text, scheme="W4AFP8"),
    "w4a16 hqq": lambda text: recipe_data(text, algorithm="hqq", symmetric=False),
    "w8a8 hqq": lambda text: recipe_data(text, scheme="W8A8", group_size=None, algorithm="hqq"),
    "w4a16 awq": lambda text: (
        recipe_data(text)
        | {"stages": [{"method": "awq"}, *recipe_data(text, algorithm="rtn")["stages"]]}
    ),
    "2:4 w4a16 hqq": lambda text: pruned_data(
        text, *recipe_data(text, algorithm="hqq")["stages"], pattern="2:4"
    ),
    "w4a16 learned": lambda text: recipe_data(text, algorithm="round", steps=8),
    "2:4 w4a16 learned": lambda text: pruned_data(
        text, *recipe_data(text, algorithm="round", steps=8)["stages"], pattern="2:4"
    ),
    "half by sparsegpt": lambda text: pruned_data(text, sparsity=0.5),
    "2:4 by wanda": lambda text: pruned_data(text, pattern="2:4", algorithm="wanda"),
    "4:8 by magnitude": lambda text: pruned_data(
        text, pattern="4:8", algorithm="magnitude", refit=False
    ),
    "2:4 w4a16": lambda text: pruned_data(text, *recipe_data(text)["stages"], pattern="2:4"),
    "half w8a8 by rtn": lambda text: pruned_data(
        text, *w8a8_data(text)["stages"][1:], sparsity=0.5
    ),
    "w4a16 without the first block": lambda text: (
        recipe_data(text) | {"ignore": ["lm_head", "model.layers.0.*"]}
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_stock_transformers_computes_what_the_checkpoint_stands_for(case, room, tmp_path):
    data = CASES[case](room / "text.txt")
    request = job_for(room / "model", data, tmp_path / "out")
    manifest = driver.compress(request)
    assert verify(tmp_path / "out") == manifest
    ours = logits_of(dequantised_model(request, round_as_compressed_tensors))
    theirs = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval())
    base = logits_of(AutoModelForCausalLM.from_pretrained(room / "model").eval())
    scale = (ours - base).norm()
    # Four values a weight, or half of the weights, leave less of a random model, which has nothing
    # but noise to keep.
    limit = 1.0 if manifest.bits == 2 or "prune" in str(manifest.recipe) else 0.5
    assert 0 < scale < limit * base.norm(), "compressed, and still the same model"
    assert (theirs - ours).norm() < 0.02 * scale


def test_the_manifest_is_complete(room, tmp_path):
    request = job_for(room / "model", w8a8_data(room / "text.txt"), tmp_path / "out")
    driver.compress(request)
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.name, manifest.scheme, manifest.bits) == ("model", "W8A8", 8)
    assert manifest.recipe == request.recipe.as_json()
    assert manifest.recipe_hash == request.recipe.hash
    assert manifest.base_model["digest"] == request.model.digest
    assert manifest.calibration["description"].startswith("file sha256:")
    assert (manifest.calibration["sequences"], manifest.calibration["sequence_length"]) == (6, 32)
    assert sorted(layer["name"] for layer in manifest.layers) == sorted(LINEARS)
    for layer in manifest.layers:
        assert layer["samples"] == 6 * 32
        assert 0 < layer["relative_error"] < 1e-3
        assert (layer["bits"], layer["density"], layer["rank"]) == (8, 1.0, None)
    assert manifest.max_model_len == 128
    assert set(manifest.libraries) >= {"taut", "torch", "transformers", "compressed-tensors"}
    listed = {path.name for path in (tmp_path / "out").iterdir()}
    assert set(manifest.files) == listed - VOLATILE_FILES - {"taut.json"}
    assert manifest.bytes == sum(
        (tmp_path / "out" / name).stat().st_size for name in manifest.files
    )
    assert manifest.validation is None
    assert not [name for name in listed if name.startswith(".")]


def test_the_golden_answer_is_the_compressed_models_own(room, tmp_path):
    request = job_for(room / "model", w8a8_data(room / "text.txt"), tmp_path / "out")
    driver.compress(request)
    golden = read_manifest(tmp_path / "out").golden
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = dequantised_model(request)
    with torch.inference_mode():
        last = model(torch.tensor([tokenizer(golden.prompt)["input_ids"]])).logits[0, -1]
    assert int(last.argmax()) == golden.expected_token
    assert golden.expected_text == tokenizer.decode([golden.expected_token])
    top = last.topk(2).values
    assert golden.margin == pytest.approx(float(top[0] - top[1]), abs=1e-3)


@pytest.mark.parametrize(
    "recipe", [recipe_data, w8a8_data, lambda text: w8a8_data(text, algorithm="gptq")]
)
def test_reported_errors_are_those_of_the_outputs(recipe, room, tmp_path):
    """First block only: further in, inputs come from blocks that are compressed already."""
    data = recipe(room / "text.txt")
    request = job_for(room / "model", data, tmp_path / "out")
    manifest = driver.compress(request)
    base = AutoModelForCausalLM.from_pretrained(room / "model").eval()
    compressed = dequantised_model(request, rounding=lambda x: x)
    tokens = calibration_tokens(request)
    name = "model.layers.0.self_attn.k_proj"
    outputs: list[torch.Tensor] = []
    with torch.inference_mode():
        for model in (base, compressed):
            layer = model.get_submodule(name)
            layer.register_forward_hook(lambda _module, _args, out: outputs.append(out))
            model(tokens)
    before, after = outputs
    expected = float((after - before).square().sum() / before.square().sum())
    (report,) = [layer for layer in manifest.layers if layer["name"] == name]
    assert report["relative_error"] == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    ("asked", "hidden", "intermediate", "used"),
    [(128, 128, 256, 128), (128, 64, 128, 64), (64, 128, 256, 64), (128, 96, 160, 32)],
)
def test_the_largest_group_size_that_divides_is_used(asked, hidden, intermediate, used, tmp_path):
    model = write_llama(tmp_path / "m", hidden=hidden, intermediate=intermediate)
    text = write_calibration_text(tmp_path / "t.txt")
    plan = driver.plan(job_for(model, recipe_data(text, group_size=asked), tmp_path / "out"))
    assert plan.group_size == used
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "stage",
    [
        {"method": "quantize", "scheme": "W4A16", "group_size": 64},
        {"method": "palettize", "entries": 16, "group_size": 64},
        {"method": "factorize", "residual": {"rank": 4, "group_size": 64}},
    ],
    ids=lambda stage: stage["method"],
)
def test_layers_that_no_group_divides_are_named(stage, tmp_path):
    model = write_llama(tmp_path / "m", intermediate=176)
    data = recipe_data(write_calibration_text(tmp_path / "t.txt")) | {"stages": [stage]}
    odd = r"inputs? \(64, 176\).*: model\.layers\.0\.mlp\.down_proj \[64, 176\] and 1 more$"
    with pytest.raises(RecipeError, match=rf"group_size.*divides every layer {odd}"):
        driver.plan(job_for(model, data, tmp_path / "out"))


def test_what_is_refused_at_every_width_names_no_layer(tmp_path):
    model = write_llama(tmp_path / "m")
    text = write_calibration_text(tmp_path / "t.txt")
    data = recipe_data(text, scheme="FP8", group_size=None, algorithm="hqq")
    with pytest.raises(RecipeError, match=r"use rtn or gptq$"):
        driver.plan(job_for(model, data, tmp_path / "out"))


def test_the_plan_says_what_happens(room, tmp_path):
    data = recipe_data(room / "text.txt") | {"ignore": ["*.down_proj"]}
    request = job_for(room / "model", data, tmp_path / "out")
    plan = driver.plan(request)
    kept = {layer.name for layer in plan.layers if layer.fate != "quantize"}
    assert kept == {name for name in LINEARS if name.endswith("down_proj")}
    driver.compress(request)
    quantized = {layer["name"] for layer in read_manifest(tmp_path / "out").layers}
    assert quantized == set(LINEARS) - kept
    actual = sum(p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors"))
    assert plan.bytes_after == pytest.approx(actual, rel=0.15), "headers are large in tiny files"


def test_ignoring_everything_is_refused(room, tmp_path):
    data = recipe_data(room / "text.txt") | {"ignore": ["*"]}
    with pytest.raises(RecipeError, match="ignore: matches every linear layer"):
        driver.compress(job_for(room / "model", data, tmp_path / "out"))


def test_tied_and_half_precision_models_come_out_whole(room, tmp_path):
    model = write_llama(tmp_path / "m", dtype=torch.bfloat16, tie=True, shard_bytes=60_000)
    driver.compress(job_for(model, w8a8_data(room / "text.txt"), tmp_path / "out"))
    assert "lm_head.weight" not in stored(tmp_path / "out")
    base = logits_of(AutoModelForCausalLM.from_pretrained(model).eval()).float()
    got = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()).float()
    assert (got - base).norm() < 0.1 * base.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cpu_without_16_bit_products_computes_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    text = write_calibration_text(tmp_path / "text.txt")
    model = write_llama(tmp_path / "m", dtype=dtype)
    with_support, without = (
        job_for(model, recipe_data(text), tmp_path / name) for name in ("with", "without")
    )
    monkeypatch.setattr("taut_deploy.compress.job.has_products", lambda asked: asked is dtype)
    assert open_stream(with_support).dtype is dtype
    narrow, plan = fingerprint(with_support), driver.plan(with_support)
    monkeypatch.setattr("taut_deploy.compress.job.has_products", lambda asked: False)
    assert open_stream(without).dtype is torch.float32
    assert compute_dtype(dtype, "cuda") is dtype
    assert fingerprint(without) != narrow, "neither continues what the other began"
    assert driver.plan(without).disk_bytes > plan.disk_bytes
    driver.compress(without)
    found = {tensor.dtype for tensor in stored(tmp_path / "without").values()}
    assert dtype in found
    assert torch.float32 not in found, "what is written has the model's type all the same"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_a_configuration_without_a_dtype_has_that_of_the_weights(dtype, tmp_path):
    model = write_llama(tmp_path / "m", layers=1, dtype=dtype)
    edit_json(model / "config.json", dtype=None)
    text = write_calibration_text(tmp_path / "t.txt")
    driver.compress(job_for(model, recipe_data(text, algorithm="rtn"), tmp_path / "out"))
    floats = {
        value.dtype for value in stored(tmp_path / "out").values() if value.is_floating_point()
    }
    assert floats == {dtype}
