"""The ``quanto`` stage against optimum-quanto itself: every number it leaves in a model is ours."""

from __future__ import annotations

import json

import pytest
import torch
from optimum.quanto import QLinear, freeze, qfloat8_e4m3fn, qint8
from optimum.quanto import quantize as quanto_quantize
from stood_for import stored
from tiny_models import job_for, recipe_data, write_calibration_text, write_llama
from transformers import AutoModelForCausalLM

from taut_deploy.checkpoint import read_manifest
from taut_deploy.compress import driver
from taut_deploy.compress.train.fake_quantize import Grid, fake_quantize
from taut_deploy.errors import ModelError

KINDS = {"int8": qint8, "float8": qfloat8_e4m3fn}


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``model/`` in bf16 and ``text.txt``."""
    path = tmp_path_factory.mktemp("room")
    write_llama(path / "model", dtype=torch.bfloat16)
    write_calibration_text(path / "text.txt")
    return path


def job(room, output, weights):
    stage = {"method": "quanto", "weights": weights}
    return job_for(room / "model", {**recipe_data(room / "text.txt"), "stages": [stage]}, output)


@pytest.mark.parametrize("weights", KINDS)
def test_a_checkpoint_holds_what_quanto_leaves_in_the_model(weights, room, tmp_path):
    request = job(room, tmp_path / "out", weights)
    driver.compress(request)
    theirs = AutoModelForCausalLM.from_pretrained(room / "model", dtype=torch.bfloat16).eval()
    quanto_quantize(theirs, weights=KINDS[weights], exclude="lm_head")
    freeze(theirs)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    ids = torch.tensor([[2, 3, 5, 7, 11, 13]])
    with torch.inference_mode():
        ours(ids)  # which decompresses the layers
    layers = {name: one for name, one in theirs.named_modules() if isinstance(one, QLinear)}
    assert len(layers) == 14
    tensors = stored(tmp_path / "out")
    for name, layer in layers.items():
        assert torch.equal(ours.get_submodule(name).weight, layer.weight.dequantize()), name
        assert torch.equal(tensors[f"{name}.weight_scale"], layer.weight._scale)
    manifest = read_manifest(tmp_path / "out")
    assert {one["method"] for one in manifest.layers} == {"quanto"}
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (group,) = entry["config_groups"].values()
    assert group["weights"]["strategy"] == "channel"
    assert "input_activations" not in group


def test_a_row_of_zeros_is_refused_by_name(room, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(room / "model")
    model.model.layers[1].mlp.up_proj.weight.data[3] = 0
    for file in (room / "model").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / "model").mkdir(exist_ok=True)
            (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    model.save_pretrained(tmp_path / "model")
    stage = {"method": "quanto", "weights": "float8"}
    data = {**recipe_data(room / "text.txt"), "stages": [stage]}
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj: has a row of zeros"):
        driver.compress(job_for(tmp_path / "model", data, tmp_path / "out"))


@pytest.mark.parametrize("weights", KINDS)
def test_training_through_rounding_is_quantos(weights):
    """Its layers, not frozen, round in their forward and let gradients pass straight through."""
    torch.manual_seed(4)
    dense = torch.nn.Linear(32, 24, bias=False)
    theirs = QLinear.from_module(dense, weights=KINDS[weights])
    x, gradient = torch.randn(5, 32), torch.randn(5, 24)
    theirs(x).backward(gradient)
    weight = dense.weight.detach().clone().requires_grad_()
    grid = Grid.of_integers(8) if weights == "int8" else Grid.of_float8()
    scale = weight.detach().abs().amax(1, keepdim=True) / grid.high
    value = torch.nn.functional.linear(x, fake_quantize(weight, scale, None, grid))
    value.backward(gradient)
    torch.testing.assert_close(theirs(x), value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(theirs.weight.grad, weight.grad, rtol=1e-5, atol=1e-5)
