"""Low-rank and codebook checkpoints: what is written, and that transformers reads just that."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from stood_for import logits_of
from tiny_families import write_family
from tiny_models import job_for, make_recipe, recipe_data
from transformers import AutoModelForCausalLM, AutoTokenizer

import taut_deploy.hf  # noqa: F401  registers the method
from taut_deploy.compress import driver
from taut_deploy.compress.resolve import resolve
from taut_deploy.diagnose.layers import manifest_layers
from taut_deploy.errors import RecipeError, WorkerError
from taut_deploy.sizing import Demand
from taut_deploy.sizing import plan as plan_memory

STAGES = {
    "low rank": {"method": "factorize", "rank_budget": 0.8},
    "low rank beside codes": {
        "method": "factorize",
        "residual": {"rank": 4, "group_size": 32, "symmetric": False},
    },
    "codebook of 16": {"method": "palettize", "entries": 16, "group_size": 32},
    "codebook of 8": {"method": "palettize", "entries": 8, "group_size": "channel", "rows": 16},
    "codebook of 4": {"method": "palettize", "entries": 4},
}
FIRST = "model-00001-of-00003.safetensors"
Q = "model.layers.0.self_attn.q_proj"  # [64, 64]
K = "model.layers.0.self_attn.k_proj"  # [32, 64]


@pytest.fixture(scope="module")
def made(room):
    """Compress by a stage once: (plan, manifest, directory)."""
    done = {}

    def make(name):
        if name not in done:
            data = {**recipe_data(room / "text.txt"), "stages": [STAGES[name]]}
            request = job_for(room / "model", data, room / name.replace(" ", "-"))
            done[name] = (driver.plan(request), driver.compress(request), request.output)
        return done[name]

    return make


def written(directory, layer):
    shard = load_file(directory / FIRST)
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    parts = {
        name.rpartition(".")[2]: value for name, value in shard.items() if name.startswith(layer)
    }
    return parts, config["layers"][layer], config


def test_factors_keep_the_share_of_parameters_asked_for(made):
    plan, manifest, directory = made("low rank")
    parts, told, config = written(directory, Q)
    # r · (64 + 64) - r² is 0.8 · 64 · 64 at 35.4, down to a multiple of 8; of [32, 64] at 22.2.
    assert {name: tuple(value.shape) for name, value in parts.items()} == {
        "weight_order": (64,),
        "weight_u": (32, 32),
        "weight_v": (32, 64),
    }
    assert written(directory, K)[1] == {"kind": "low_rank", "rank": 16, "interpolative": True}
    assert config["quant_method"] == "taut"
    assert told == {"kind": "low_rank", "rank": 32, "interpolative": True}
    assert (manifest.scheme, plan.scheme) == ("LOWRANK", "LOWRANK")
    assert {layer["rank"] for layer in manifest.layers} == {32, 16, 40}
    sizes = {layer.name: layer.bytes for layer in plan.layers}
    assert sizes[Q] == sum(value.nbytes for value in parts.values())


def test_codes_and_their_correction_lie_side_by_side(made):
    plan, manifest, directory = made("low rank beside codes")
    parts, told, _ = written(directory, Q)
    assert sorted(parts) == [
        "weight_packed",
        "weight_scale",
        "weight_shape",
        "weight_u",
        "weight_v",
        "weight_zero_point",
    ]
    assert told == {
        "kind": "low_rank",
        "rank": 4,
        "base": {"num_bits": 4, "group_size": 32, "symmetric": False},
    }
    assert (manifest.scheme, manifest.bits) == ("W4A16-LOWRANK", 4)
    assert manifest.layers[0]["method"] == "gptq+factorize"
    sizes = {layer.name: layer.bytes for layer in plan.layers}
    assert sizes[Q] == sum(value.nbytes for value in parts.values())


@pytest.mark.parametrize(("entries", "bits"), [(16, 4), (8, 3), (4, 2)])
def test_indices_take_their_bits_and_no_more(entries, bits, made):
    plan, manifest, directory = made(f"codebook of {entries}")
    parts, told, _ = written(directory, K)
    assert parts["weight_packed"].shape == (32, 64 * bits // 8)
    assert parts["weight_packed"].dtype == torch.uint8
    assert parts["weight_shape"].tolist() == [32, 64]
    assert parts["weight_codebook"].shape == (2 if entries == 8 else 1, entries)
    assert (manifest.scheme, manifest.bits) == (f"CODEBOOK{entries}", bits)
    assert told["entries"] == entries
    sizes = {layer.name: layer.bytes for layer in plan.layers}
    assert sizes[K] == sum(value.nbytes for value in parts.values())


def dense_twin(room, directory):
    """The base model with every layer's weight made of the stored tensors by hand, fp64."""
    model = AutoModelForCausalLM.from_pretrained(room / "model").eval()
    for path in sorted(directory.glob("model-*.safetensors")):
        stored = load_file(path)
        for layer in {name.rpartition(".")[0] for name in stored}:
            parts = {
                name.rpartition(".")[2]: value
                for name, value in stored.items()
                if name.rpartition(".")[0] == layer
            }
            if "weight" not in parts:
                model.get_submodule(layer).weight.data = by_hand(parts)
    return model


def by_hand(parts):
    """A weight out of its stored tensors, one number at a time."""
    weight = 0.0
    if "weight_u" in parts:
        weight = parts["weight_u"].double() @ parts["weight_v"].double()
        if "weight_order" in parts:
            both = [*parts["weight_v"].double(), *weight]
            weight = torch.stack([both[place] for place in parts["weight_order"].tolist()])
    if "weight_packed" not in parts:
        return weight.float()
    n, k = parts["weight_shape"].tolist()
    scale = parts["weight_scale"].double()
    groups = scale.shape[1]
    values = torch.zeros(n, k, dtype=torch.float64)
    book = parts.get("weight_codebook")
    for i in range(n):
        row = int.from_bytes(parts["weight_packed"][i].numpy().tobytes(), "little")
        bits = 4 if book is None else parts["weight_packed"].shape[1] * 8 // k
        for j in range(k):
            code = row >> bits * j & 2**bits - 1
            group = j * groups // k
            if book is not None:
                value = float(book[i * book.shape[0] // n, code])
            else:
                word = int(parts["weight_zero_point"][i // 8, group])
                value = code - (word >> 4 * (i % 8) & 15)
            values[i, j] = value * float(scale[i, group])
    return (values + weight).float()


@pytest.mark.parametrize("name", STAGES)
def test_transformers_loads_the_model_that_the_tensors_stand_for(name, room, made):
    directory = made(name)[2]
    loaded, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours, twin = logits_of(loaded.eval()), logits_of(dense_twin(room, directory))
    base = logits_of(AutoModelForCausalLM.from_pretrained(room / "model").eval())
    assert (ours - twin).norm() < 1e-5 * twin.norm()
    assert (ours - base).norm() > 1e-3 * base.norm(), "something was compressed"


@pytest.mark.parametrize("stage", ["low rank", "codebook of 16"])
@pytest.mark.parametrize("family", ["gpt2", "phi3", "bloom", "llama with biases"])
def test_families_that_name_turn_and_join_layers_otherwise_load(family, stage, room, tmp_path):
    model = write_family(tmp_path / "model", family)
    data = {**recipe_data(room / "text.txt"), "stages": [STAGES[stage]]}
    manifest = driver.compress(job_for(model, data, tmp_path / "out"))
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    shards = (tmp_path / "out").glob("*.safetensors")
    stored = {name for shard in shards for name in load_file(shard)}
    assert all(
        any(name.startswith(f"{layer}.weight_") for name in stored) for layer in config["layers"]
    )
    # What it says as a whole is what it said block by block, as it was compressed.
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")(manifest.golden.prompt)["input_ids"]
    with torch.no_grad():
        last = loaded.eval()(torch.tensor([ids])).logits[0, -1]
    first, second = last.topk(2).values.tolist()
    assert int(last.argmax()) == manifest.golden.expected_token
    assert manifest.golden.margin == pytest.approx(first - second, abs=1e-3)


LOADERS = """
import sys
from pathlib import Path
import torch
from taut_deploy.{module} import {loader}
directory = Path(sys.argv[1])
model = {call}
print(type(model.model.layers[0].self_attn.q_proj).__name__)
"""


@pytest.mark.parametrize(
    ("module", "loader", "call"),
    [
        (
            "validate.checkpoint_source",
            "CheckpointSource",
            "CheckpointSource(directory, 'candidate', 'cpu')._model",
        ),
        ("compress.dense", "load_dense", "load_dense(directory, 'cpu', trust_remote_code=False)"),
        ("commands.subject", "_load", "_load(directory, None, torch.device('cpu'))"),
    ],
)
def test_every_loader_of_ours_knows_the_method(module, loader, call, made, run_with_transformers):
    script = LOADERS.format(module=module, loader=loader, call=call)
    done = run_with_transformers(script, made("low rank")[2])
    assert done.stdout.split() == ["_LowRank"], done.stderr[-2000:]


@pytest.mark.parametrize("name", STAGES)
def test_the_doctor_sees_each_layer_in_its_own_shape(name, made):
    _, manifest, directory = made(name)
    config = json.loads((directory / "config.json").read_text())
    found = manifest_layers(directory, manifest, config)
    assert found[K][:2] == (32, 64)
    assert found["model.layers.0.mlp.down_proj"][:2] == (64, 128)
    assert found[Q][2].name == manifest.scheme


@pytest.mark.parametrize(
    ("name", "grown"),
    # Weights of both blocks, in 16 bits instead of 4 or 3; factors stay as they are.
    [("codebook of 16", 73728 * 12 // 8), ("codebook of 8", 73728 * 13 // 8), ("low rank", 0)],
)
def test_memory_is_planned_for_what_a_worker_dequantises(name, grown, made):
    directory = made(name)[2]
    files = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    planned = plan_memory("m", directory, Demand(memory_gib=8))
    assert planned.weights_bytes == files + grown


def test_devices_that_cannot_share_the_layers_are_not_planned_for(made):
    demand = Demand(memory_gib=8, tensor_parallel=2)
    with pytest.raises(WorkerError, match="quant_method taut, which is served on one device"):
        plan_memory("m", made("low rank")[2], demand)


REFUSED = {
    "both methods": (
        [{"method": "palettize", "entries": 16, "layers": ["*mlp*"]}, {"method": "quantize",
          "scheme": "W4A16", "group_size": 32, "algorithm": "rtn", "layers": ["*attn*"]}],
        r"gate_proj is stored as CODEBOOK16 \(quant_method taut\) and .*q_proj as W4A16",
    ),
    "a rank above the width": (
        [{"method": "factorize", "rank": 70}],
        r"q_proj \[64, 64\] cannot be LOWRANK: rank 70 is above its smaller width 64",
    ),
    "a rank that saves nothing": (
        [{"method": "factorize", "rank": 32}],
        r"k_proj \[32, 64\] cannot be LOWRANK: rank 32 saves nothing",
    ),
    "a budget of nothing": (
        [{"method": "factorize", "rank_budget": 0.01}],
        r"q_proj .* cannot be LOWRANK: rank_budget 0.01 leaves it no rank",
    ),
    "a correction that costs more than it corrects": (
        [{"method": "factorize", "residual": {"rank": 30, "group_size": 32}}],
        r"q_proj .* cannot be W4A16-LOWRANK: rank 30 saves nothing: codes and factors",
    ),
    "books for rows that do not divide": (
        [{"method": "palettize", "entries": 8, "rows": 24}],
        r"q_proj .* cannot be CODEBOOK8: codebook: rows 24 does not divide N = 64",
    ),
}  # fmt: skip


def test_experts_are_refused_before_vllm_refuses_them():
    recipe = make_recipe({"name": "r", "stages": [STAGES["codebook of 16"]]})
    shapes = {"model.layers.0.mlp.experts.3.w1": (64, 64), "model.layers.0.mlp.gate": (4, 64)}
    with pytest.raises(RecipeError, match=r"experts\.3\.w1 is one of many .* no CODEBOOK16"):
        resolve(shapes, recipe, torch.bfloat16)


UNREADABLE = {
    "two sizes at once": (
        {"method": "factorize", "rank": 4, "rank_budget": 0.5},
        "'residual', not rank_budget and rank",
    ),
    "no size": ({"method": "factorize"}, "exactly one of 'rank_budget', 'rank' and 'residual'"),
    "a share above one": ({"method": "factorize", "rank_budget": 1.2}, "rank_budget"),
    "entries that are no power of two": ({"method": "palettize", "entries": 12}, "entries"),
    "no entries": ({"method": "palettize"}, "entries"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_recipe_that_asks_for_what_is_not_there_is_refused(case):
    stage, message = UNREADABLE[case]
    with pytest.raises(RecipeError, match=message) as refused:
        make_recipe({"name": "r", "stages": [stage]})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("stage", "after", "message"),
    [
        ({"method": "palettize", "entries": 8}, "distil", "codebooks cannot be trained"),
        ({"method": "factorize", "residual": {"rank": 2}}, "distil", "'residual' cannot be train"),
        (
            {"method": "factorize", "rank": 8},
            "qat",
            "'qat' trains through rounding; put 'quantize'",
        ),
    ],
)
def test_a_recipe_that_trains_what_has_no_gradient_is_refused(stage, after, message):
    with pytest.raises(RecipeError, match=message):
        make_recipe({"name": "r", "stages": [stage, {"method": after}]})


@pytest.mark.parametrize("stage", ["palettize", "factorize"])
def test_pruned_weights_are_not_filled_again(stage, room, tmp_path):
    how = {"entries": 16} if stage == "palettize" else {"rank_budget": 0.5}
    pruned = {"method": "prune", "sparsity": 0.5, "algorithm": "magnitude"}
    stages = [pruned, {"method": stage, **how}]
    data = {**recipe_data(room / "text.txt"), "stages": stages}
    with pytest.raises(RecipeError, match="q_proj is pruned by stage 0, and stage 1 would fill"):
        driver.plan(job_for(room / "model", data, tmp_path / "out"))


@pytest.mark.parametrize("case", REFUSED)
def test_the_plan_refuses_what_does_not_fit(case, room, tmp_path):
    stages, message = REFUSED[case]
    data = {**recipe_data(room / "text.txt"), "stages": stages}
    with pytest.raises(RecipeError, match=message) as refused:
        driver.plan(job_for(room / "model", data, tmp_path / "out"))
    assert "\n" not in str(refused.value)
