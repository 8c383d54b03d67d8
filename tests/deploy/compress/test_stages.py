"""Stages meet one layer format: mixtures, masks, patterns, and what a recipe must not ask for."""

from __future__ import annotations

import json
from typing import ClassVar, Literal

import pytest
import torch
from safetensors.torch import load_file
from stood_for import dequantised_model, layers_seen, logits_of, round_as_compressed_tensors
from tiny_blocks import make_block
from tiny_models import job_for, recipe_data, w8a8_data
from transformers import AutoModelForCausalLM

from taut_deploy.checkpoint import read_manifest
from taut_deploy.compress import driver
from taut_deploy.compress.block import compress_block
from taut_deploy.compress.resolve import resolve
from taut_deploy.compress.stages import BLOCK_STAGES, BlockStage
from taut_deploy.errors import ModelError, RecipeError
from taut_deploy.files import sha256_file
from taut_deploy.recipe import Order, Quantize, Recipe, StageModel, load_recipe, matches

# Recipes of before stages had formats. Bytes are of rounding to nearest alone: a GPTQ's sums are
# taken in another order on another CPU.
HASHES = {
    "w8a8": "54022def083012532c0177bc4373231795f69a8774368ef6b200a8fd21e7e71c",
    "w4a16": "fae388ef4754f1abc11c4c709a585407b8925c5bd6a46d10c74bebb1fd06a376",
    "w4a16-g128": "32729d94a2848a1f17b6c6628e8dbd15fed35909e2ea9c45e443e17356c5c257",
}
ROUNDED_SHARD = "a854b7ff7dcc98914d6d0b731659fc511261d8c4e904e43265daf603ce0b078f"
ROUNDED_CONFIG = "fbaa731ae73d32202334fa15c2bf7495a840dd82fe486d689c33fef8ceae482f"


def with_stages(room, *stages, **others):
    return {**recipe_data(room / "text.txt"), "stages": list(stages), **others}


def quantize(scheme="W4A16", **changes):
    groups = {} if scheme == "W8A8" else {"group_size": 32}
    return {"method": "quantize", "scheme": scheme, "algorithm": "rtn", **groups, **changes}


@pytest.mark.parametrize("name", HASHES)
def test_shipped_recipes_keep_the_hash_of_checkpoints_made_before(name):
    assert load_recipe(name).hash == f"sha256:{HASHES[name]}"


def test_rounded_checkpoints_keep_their_bytes(room, tmp_path):
    data = recipe_data(room / "text.txt", group_size=64, algorithm="rtn")
    driver.compress(job_for(room / "model", data, tmp_path / "out"))
    assert sha256_file(tmp_path / "out" / "model-00001-of-00003.safetensors") == ROUNDED_SHARD
    assert sha256_file(tmp_path / "out" / "config.json") == ROUNDED_CONFIG


def test_two_schemes_in_one_checkpoint_load_in_stock_transformers(room, tmp_path):
    data = with_stages(
        room,
        quantize(layers=["re:.*self_attn"]),
        quantize(group_size=64, symmetric=False, layers=["*.gate_proj", "*.up_proj"]),
        quantize("W8A8", layers=["*.down_proj"]),
    )
    request = job_for(room / "model", data, tmp_path / "out")
    plan = driver.plan(request)
    manifest = driver.compress(request)
    ours, theirs, base = (
        logits_of(model)
        for model in (
            dequantised_model(request, round_as_compressed_tensors),
            AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(),
            AutoModelForCausalLM.from_pretrained(room / "model").eval(),
        )
    )
    assert (theirs - ours).norm() < 0.05 * (ours - base).norm()
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    groups = config["config_groups"].values()
    found = {group["format"]: group["weights"]["num_bits"] for group in groups}
    assert found == {"pack-quantized": 4, "int-quantized": 8}
    assert sum(len(group["targets"]) for group in groups) == 14
    assert (plan.scheme, plan.group_size) == ("mixed", None)
    weights = {"W4A16": 2 * 64 * (64 + 32 + 32 + 64 + 128 + 128), "W8A8": 2 * 64 * 128}
    mean = (4 * weights["W4A16"] + 8 * weights["W8A8"]) / sum(weights.values())
    assert (manifest.scheme, manifest.bits) == ("mixed", round(mean, 2))
    assert read_manifest(tmp_path / "out").bits == manifest.bits
    told = {layer["name"].split(".")[-1]: layer["scheme"] for layer in manifest.layers}
    assert (told["down_proj"], told["q_proj"]) == ("W8A8", "W4A16")


class Half(StageModel):
    """A pruning stage for tests: every second weight of a row goes."""

    order: ClassVar[Order] = Order.PRUNE
    method: Literal["half"] = "half"


def prune_half(state, index, stage):
    for layer in state.of_stage(index):
        layer.mask = torch.ones_like(layer.module.weight, dtype=torch.bool)
        layer.mask[:, ::2] = False
        layer.module.weight.data = layer.module.weight.data * layer.mask
        layer.methods.append(stage.method)


def compressed(monkeypatch, *stages):
    """A tiny block, compressed by stages that no recipe file can name yet."""
    monkeypatch.setitem(BLOCK_STAGES, "half", BlockStage(prune_half))
    block, hidden, arguments = make_block("llama")
    recipe = Recipe.model_construct(name="r", stages=stages, ignore=("lm_head",))
    shapes = {
        f"b.{name}": tuple(module.weight.shape)
        for name, module in block.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    before = {name: block.get_submodule(name[2:]).weight.data.clone() for name in shapes}
    with torch.no_grad():
        result = compress_block(
            block,
            "b",
            hidden,
            arguments,
            recipe=recipe,
            treatments=resolve(shapes, recipe, torch.float32),
            dtype=torch.float32,
            batch_size=2,
        )
    return block, before, result


@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_rounding_keeps_pruned_weights_at_zero(monkeypatch, algorithm, symmetric):
    quantise = Quantize(scheme="W4A16", group_size=32, algorithm=algorithm, symmetric=symmetric)
    _, _, result = compressed(monkeypatch, Half(), quantise)
    for name, layer in result.stored.items():
        assert layer.reads_back(layer.tensors()), name
        weight = layer.dequantize()
        assert (weight[:, ::2] == 0).all(), name
        assert (weight[:, 1::2] != 0).float().mean() > 0.7, name
    for report in result.reports:
        assert (report.method, report.scheme) == (f"half+{algorithm}", "W4A16")
        assert report.density == 0.5
        assert report.relative_error > 0.05, "against the weights before pruning"


def test_a_recipe_that_only_prunes_stores_zeros_and_says_so(monkeypatch):
    block, before, result = compressed(monkeypatch, Half(layers=("*mlp*",)))
    assert sorted(result.stored) == ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]
    for name, layer in result.stored.items():
        (key,) = layer.tensors()
        written = layer.tensors()[key]
        assert key == "weight"
        assert torch.equal(written[:, 1::2], before[f"b.{name}"][:, 1::2])
        assert (written[:, ::2] == 0).all()
        assert torch.equal(block.get_submodule(name).weight, written)
    assert {(r.scheme, r.bits, r.density) for r in result.reports} == {("dense", 32, 0.5)}


def test_a_layer_that_no_token_reaches_is_refused(monkeypatch):
    block, hidden, arguments = make_block("llama")
    recipe = Recipe.model_construct(name="r", stages=(Half(),), ignore=())
    shapes = {"b.mlp.unused": (8, 8), "b.mlp.up_proj": (128, 64)}
    monkeypatch.setitem(BLOCK_STAGES, "half", BlockStage(prune_half))
    treatments = resolve(shapes, recipe, torch.float32)
    with pytest.raises(ModelError, match=r"b\.mlp\.unused: no calibration token reached"):
        compress_block(
            block,
            "b",
            hidden,
            arguments,
            recipe=recipe,
            treatments=treatments,
            dtype=torch.float32,
            batch_size=2,
        )


REFUSED = {
    "a pattern of a stage that matches nothing": (
        [quantize(layers=["*.q_prjo"])],
        r"stages\.0\.layers: '\*\.q_prjo' matches no linear layer",
    ),
    "an ignore of a stage that matches nothing": (
        [quantize(ignore=["re:model\\.layer\\."])],
        r"stages\.0\.ignore: 're:model.*matches no linear layer",
    ),
    "two schemes for one layer": (
        [quantize(layers=["*mlp*"]), quantize("W8A8")],
        r"stages: .*mlp\.gate_proj is stored twice, by stages\.0 and stages\.1",
    ),
    "the same transform twice": (
        [{"method": "smooth"}, {"method": "smooth", "alpha": 0.5}, quantize("W8A8")],
        r"q_proj is treated twice",
    ),
    "queries apart from keys": (
        [quantize(layers=["*.q_proj"]), quantize("W8A8", ignore=["*.q_proj"])],
        r"vLLM joins these layers of model\.layers\.0\.self_attn .*q_proj W4A16 g32, k_proj W8A8",
    ),
    "a gate left dense": (
        [quantize(ignore=["re:.*gate"])],
        r"vLLM joins .*mlp .*gate_proj dense, up_proj W4A16 g32",
    ),
    "groups of two sizes in one joined layer": (
        [
            quantize(layers=["*.up_proj"]),
            quantize(group_size=64, ignore=["*.up_proj"]),
        ],
        r"gate_proj W4A16 g64, up_proj W4A16 g32",
    ),
    "a head, which stays as it is": (
        [quantize(layers=["lm_head"])],
        r"stages\.0: .*lm_head.* leaves no linear layer of a decoder block",
    ),
    "a stage with nothing left": (
        [quantize(layers=["*mlp*"], ignore=["*mlp*"]), quantize("W8A8")],
        r"stages\.0: .*leaves no linear layer",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_plan_refuses_what_the_run_or_vllm_would(case, room, tmp_path):
    stages, message = REFUSED[case]
    with pytest.raises(RecipeError, match=message) as refused:
        driver.plan(job_for(room / "model", with_stages(room, *stages), tmp_path / "out"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("pattern", ["*.k_proj", "re:.*k_proj"])
def test_an_ignore_that_splits_a_joined_layer_is_refused(pattern, room, tmp_path):
    data = w8a8_data(room / "text.txt") | {"ignore": [pattern]}
    with pytest.raises(RecipeError, match="stored alike: q_proj W8A8, k_proj dense, v_proj W8A8"):
        driver.plan(job_for(room / "model", data, tmp_path / "out"))


@pytest.mark.parametrize(
    ("pattern", "name", "matched"),
    [
        ("*.k_proj", "model.layers.0.self_attn.k_proj", True),
        ("*.K_proj", "model.layers.0.self_attn.k_proj", False),
        ("model.layers.1.*", "model.layers.11.mlp.up_proj", False),
        ("re:model.layers.1", "model.layers.11.mlp.up_proj", True),
        (r"re:.*\.layers\.1\.", "model.layers.11.mlp.up_proj", False),
        ("re:mlp", "model.layers.1.mlp.up_proj", False),
        ("re:.*_proj$", "model.layers.1.mlp.up_proj", True),
    ],
)
def test_patterns_are_read_as_compressed_tensors_reads_them(pattern, name, matched):
    from compressed_tensors.utils.match import match_name

    assert matches(name, pattern) is matched
    if pattern.startswith("re:"):
        assert match_name(name, pattern) is matched


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_pruned_layers_of_a_dense_checkpoint_have_no_quantization_config(
    room, tmp_path, monkeypatch
):
    monkeypatch.setitem(BLOCK_STAGES, "half", BlockStage(prune_half))
    request = job_for(room / "model", recipe_data(room / "text.txt"), tmp_path / "out")
    object.__setattr__(request.recipe, "stages", (Half(layers=("*mlp*",)),))
    manifest = driver.compress(request)
    assert (manifest.scheme, manifest.bits, len(manifest.layers)) == ("dense", 32, 6)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    shard = load_file(tmp_path / "out" / "model-00001-of-00003.safetensors")
    assert (shard["model.layers.0.mlp.up_proj.weight"][:, ::2] == 0).all()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("scheme", ["W8A16", "W2A16", "FP8"])
def test_the_doctor_sees_layers_of_other_widths_in_their_own_shape(scheme, room, tmp_path):
    groups = {"group_size": None} if scheme == "FP8" else {}
    data = with_stages(room, {k: v for k, v in quantize(scheme, **groups).items() if v is not None})
    driver.compress(job_for(room / "model", data, tmp_path / "out"))
    found = layers_seen(tmp_path / "out")
    assert found["model.layers.0.mlp.down_proj"][:2] == (64, 128)
    assert found["model.layers.0.self_attn.k_proj"][:2] == (32, 64)
    assert found["model.layers.0.mlp.down_proj"][2].name == scheme


def test_the_doctor_sees_what_no_vllm_loads_of_a_checkpoint_of_ours(room, tmp_path):
    data = with_stages(room, quantize("W3A16"))
    driver.compress(job_for(room / "model", data, tmp_path / "out"))
    found = layers_seen(tmp_path / "out")
    name = "model.layers.0.mlp.down_proj"
    assert str(found[name][2].unserved.why(name, "cuda")).startswith("vLLM reads weights of 3 bits")
