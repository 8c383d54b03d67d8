"""The ``prune`` stage in the pipeline: what is written, what is reported, what is refused."""

from __future__ import annotations

import pytest
import torch
from stood_for import dequantised_model, stored
from tiny_models import (
    job_for,
    pruned_data,
    recipe_data,
    write_llama,
    write_recipe,
)
from transformers import AutoModelForCausalLM

from taut_deploy import cli
from taut_deploy.checkpoint import read_manifest
from taut_deploy.compress import driver
from taut_deploy.compress.calibrate.calibration import make_calibration_set
from taut_deploy.compress.prune.patterns import parse_pattern
from taut_deploy.errors import RecipeError


def run(room, output, *later, **prune):
    request = job_for(room / "model", pruned_data(room / "text.txt", *later, **prune), output)
    return request, driver.compress(request)


@pytest.mark.parametrize("algorithm", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize(("pattern", "run_length", "kept"), [("2:4", 4, 2), ("4:8", 8, 4)])
def test_every_written_run_keeps_what_the_pattern_says(
    algorithm, pattern, run_length, kept, room, tmp_path
):
    _, manifest = run(room, tmp_path / "out", algorithm=algorithm, pattern=pattern)
    tensors = stored(tmp_path / "out")
    for layer in manifest.layers:
        weight = tensors[layer["name"] + ".weight"]
        assert ((weight.view(-1, run_length) != 0).sum(1) == kept).all(), layer["name"]
        assert layer["density"] == kept / run_length
        assert layer["method"] == f"{algorithm}+refit"


@pytest.mark.parametrize("sparsity", [0.25, 0.5])
def test_reports_say_the_share_of_weights_that_was_written_as_not_zero(sparsity, room, tmp_path):
    _, manifest = run(room, tmp_path / "out", sparsity=sparsity)
    tensors = stored(tmp_path / "out")
    for layer in read_manifest(tmp_path / "out").layers:
        weight = tensors[layer["name"] + ".weight"]
        assert layer["density"] == pytest.approx(float((weight != 0).float().mean()), abs=1e-6)
        assert layer["density"] == pytest.approx(1 - sparsity, abs=0.01)
    assert (manifest.scheme, manifest.bits) == ("dense", 32)


@pytest.mark.parametrize("quantize", [{}, {"symmetric": False}, {"algorithm": "rtn"}])
def test_rounding_afterwards_keeps_the_pattern(quantize, room, tmp_path):
    later = recipe_data(room / "text.txt", **quantize)["stages"]
    request, manifest = run(room, tmp_path / "out", *later, pattern="2:4")
    model = dequantised_model(request)
    for layer in manifest.layers:
        runs = model.get_submodule(layer["name"]).weight.view(-1, 4)
        assert ((runs != 0).sum(1) <= 2).all(), layer["name"]
        assert layer["density"] == 0.5
        algorithm = quantize.get("algorithm", "gptq")
        assert (layer["method"], layer["scheme"]) == (f"sparsegpt+refit+{algorithm}", "W4A16")
    # What the rounded codes lose is far less than what went: the mask was not rounded away.
    assert sum(layer["relative_error"] for layer in manifest.layers) < 14 * 0.5


def test_refitting_lowers_the_error_of_the_block_outputs(room, tmp_path):
    """Of the first block, whose inputs are the same in both runs."""
    errors = {}
    for refit in (False, True):
        _, manifest = run(
            room, tmp_path / str(refit), algorithm="wanda", pattern="2:4", refit=refit
        )
        errors[refit] = [
            layer["relative_error"] for layer in manifest.layers if ".layers.0." in layer["name"]
        ]
    for before, after in zip(errors[False], errors[True], strict=True):
        assert after < before


def test_wanda_without_refitting_leaves_what_stays_as_it_was(room, tmp_path):
    request, _ = run(room, tmp_path / "out", algorithm="wanda", sparsity=0.5, refit=False)
    base = AutoModelForCausalLM.from_pretrained(request.model.path)
    tokens = make_calibration_set(
        request.recipe.calibration, request.model, tmp_path / "cache"
    ).tokens
    inputs = []
    layer = base.model.layers[0].self_attn.k_proj
    layer.register_forward_pre_hook(lambda _module, args: inputs.append(args[0].flatten(0, 1)))
    with torch.inference_mode():
        base(tokens)
    scores = layer.weight.abs() * inputs[0].square().sum(0).sqrt()
    expected = torch.zeros_like(layer.weight)
    for row, score in enumerate(scores):
        kept = score.topk(32).indices
        expected[row, kept] = layer.weight[row, kept]
    written = stored(tmp_path / "out")["model.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(written, expected)


@pytest.mark.parametrize(("pattern", "intermediate"), [("2:4", 130), ("4:8", 132)])
def test_the_plan_refuses_a_width_that_runs_do_not_divide(pattern, intermediate, room, tmp_path):
    model = write_llama(tmp_path / "m", intermediate=intermediate)
    data = pruned_data(room / "text.txt", pattern=pattern)
    message = (
        rf"stages\.prune: model\.layers\.0\.mlp\.down_proj \[64, {intermediate}\]: "
        rf"pattern {pattern} needs input widths divisible by {parse_pattern(pattern).run}, "
        rf"this layer has {intermediate}; put it into 'ignore'"
    )
    with pytest.raises(RecipeError, match=message):
        driver.plan(job_for(model, data, tmp_path / "out"))
    data["stages"][0]["ignore"] = ["*.down_proj"]
    plan = driver.plan(job_for(model, data, tmp_path / "out"))
    assert plan.bytes_after == plan.bytes_before, "zeros are written out"


def test_the_command_tells_pruned_layers_from_those_left_alone(room, tmp_path, capsys, monkeypatch):
    data = pruned_data(room / "text.txt", pattern="2:4", ignore=["*.down_proj"])
    recipe = write_recipe(tmp_path / "recipe.yaml", data)
    arguments = ["compress", str(room / "model"), "--recipe", str(recipe), "--plan"]
    monkeypatch.setattr("sys.argv", ["taut", *arguments])
    assert cli.main() == 0
    lines = capsys.readouterr().out.splitlines()
    fates = {line.split()[0]: line.split(": ")[1] for line in lines if line.startswith("  ")}
    assert len(fates) == 7
    assert fates.pop("mlp.down_proj") == "not picked by any stage"
    assert set(fates.values()) == {"prune"}
