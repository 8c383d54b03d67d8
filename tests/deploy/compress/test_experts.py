"""Mixtures of experts: each expert calibrated, reported and stored by itself."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from compressed_tensors.utils.match import match_name
from safetensors.torch import load_file, save_file
from stood_for import load_whole, logits_of, plain_copy, says_golden, stored
from tiny_families import EXPERTS, MOE, write_family
from tiny_models import job_for, recipe_data, write_calibration_text
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from validate_setup import write_tokenizer

from taut_deploy.compress import driver
from taut_deploy.compress.calibrate.observe import observe_block
from taut_deploy.compress.source.stream import StreamedModel
from taut_deploy.errors import RecipeError
from taut_deploy.validate.checkpoint_source import CheckpointSource
from taut_deploy.validate.errors import CouldNotValidateError

# transformers stacks the experts of these itself, whatever it reads.
STACKED_ON_DISK = {"llama4"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_calibration_text(tmp_path_factory.mktemp("room") / "text.txt")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("mixtral") / "model", "mixtral")


def matrices(model: Path) -> int:
    """Linear layers of the blocks with each expert's three matrices, routers left out."""
    found = AutoModelForCausalLM.from_pretrained(model).model.layers
    linears = sum(
        isinstance(module, nn.Linear) and not name.endswith(("router", "expert_gate"))
        for name, module in found.named_modules()
    )
    stacks = [p for name, p in found.named_parameters() if name.endswith("experts.down_proj")]
    return linears + 3 * sum(len(stack) for stack in stacks)


@pytest.mark.parametrize("family", EXPERTS)
def test_every_expert_is_compressed_under_its_published_name(family, text, tmp_path):
    model = write_family(tmp_path / "m", family)
    manifest = driver.compress(job_for(model, recipe_data(text), tmp_path / "out"))
    assert f"{EXPERTS[family][2]}.weight_packed" in stored(tmp_path / "out")
    assert len(manifest.layers) == matrices(model)
    for layer in manifest.layers:
        assert layer["method"] == "gptq"
        assert 0 < layer["relative_error"] < 0.2
        assert layer["samples"] == 6 * 32, "too few tokens for routing alone: all are shown"
    loaded = load_whole(tmp_path / "out")
    says_golden(loaded, tmp_path / "out", manifest.golden)
    if family not in STACKED_ON_DISK:
        plain = load_whole(plain_copy(tmp_path / "out", tmp_path / "p", 4, turned=False))
        torch.testing.assert_close(logits_of(loaded), logits_of(plain), atol=1e-4, rtol=1e-4)
    base = logits_of(load_whole(model))
    assert 0 < (logits_of(loaded) - base).norm() < 0.6 * base.norm()


def observed(model: Path, sequences: int):
    """Statistics of the first block, and what its experts really were given."""
    stream = StreamedModel(model, torch.float32, torch.device("cpu"))
    stream.rehearse()
    generator = torch.Generator().manual_seed(3)
    hidden, arguments = stream.enter(torch.randint(2, 60, (sequences, 32), generator=generator))
    block = stream.blocks[0].module
    stream.load(block, "model.layers.0")
    routed: dict[str, torch.Tensor] = {}
    handles = [
        module.register_forward_pre_hook(lambda _, args, n=name: routed.__setitem__(n, args[0]))
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and ".experts." in name
    ]
    with torch.inference_mode():
        block(hidden, **arguments[0])
    for handle in handles:
        handle.remove()
    return observe_block(block, hidden, arguments[0], batch_size=4), routed, hidden


def test_an_expert_with_enough_tokens_sees_those_routed_to_it(mixtral):
    groups, routed, _ = observed(mixtral, sequences=40)
    experts = [group for group in groups if ".experts." in group.layers[0]]
    assert len(experts) == 2 * 4
    for group in experts:
        rows = routed[group.layers[0]].double()
        assert group.routed is None
        assert group.tokens == len(rows) > 256
        expected = rows.T @ rows / len(rows)
        torch.testing.assert_close(group.hessian.double(), expected, rtol=1e-3, atol=1e-4)


def test_an_expert_with_few_tokens_sees_all(mixtral):
    groups, routed, hidden = observed(mixtral, sequences=6)
    up = next(group for group in groups if ".experts.0.w1" in group.layers[0])
    assert {name.rpartition(".")[2] for name in up.layers} == {"w1", "w3"}
    assert up.routed == len(routed[up.layers[0]]) < 256
    assert up.tokens == hidden.shape[0] * hidden.shape[1]
    others = [group for group in groups if ".experts.3.w1" in group.layers[0]]
    torch.testing.assert_close(up.hessian, others[0].hessian, msg="every expert saw the same")


def test_experts_nobody_chooses_are_calibrated_all_the_same(text, tmp_path):
    model = write_family(tmp_path / "m", "mixtral")
    file = model / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("block_sparse_moe.gate.weight"):
            tensors[name].zero_()  # a tie, which the first two experts win
    save_file(tensors, file, metadata={"format": "pt"})
    manifest = driver.compress(job_for(model, recipe_data(text), tmp_path / "out"))
    unchosen = [layer for layer in manifest.layers if layer.get("routed") == 0]
    assert len(unchosen) == 2 * 2 * 3, "two of four experts, in two blocks"
    assert all(layer["samples"] == 6 * 32 for layer in unchosen)


def test_routers_stay_dense_and_readers_are_told(mixtral, text, tmp_path):
    driver.compress(job_for(mixtral, recipe_data(text), tmp_path / "out"))
    assert "model.layers.0.block_sparse_moe.gate.weight" in stored(tmp_path / "out")
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {f"model.layers.{i}.block_sparse_moe.gate" for i in (0, 1)} < set(entry["ignore"])


def test_experts_stored_unlike_each_other_are_refused(mixtral, text, tmp_path):
    data = recipe_data(text) | {"ignore": ["*.experts.2.*"]}
    with pytest.raises(RecipeError, match=r"must be stored alike: .* W4A16 g32") as refused:
        driver.plan(job_for(mixtral, data, tmp_path / "out"))
    assert len(str(refused.value)) < 400


def test_validate_takes_no_experts_that_transformers_reads_without_their_zero_points(
    mixtral, text, tmp_path
):
    data = recipe_data(text, symmetric=False, algorithm="rtn")
    driver.compress(job_for(mixtral, data, tmp_path / "out"))
    with pytest.raises(CouldNotValidateError, match="cannot be loaded"):
        CheckpointSource(tmp_path / "out", "candidate", "cpu")


def test_a_norm_that_a_router_reads_too_is_not_smoothed(text, tmp_path):
    """DeepSeek's router and shared expert read one norm: factors for one would spoil the other."""
    model = write_family(tmp_path / "m", "deepseek_v3")
    groups, _, _ = observed_block(model, 1)
    shared = next(group for group in groups if "shared_experts.gate_proj" in group.layers[0])
    assert shared.read_elsewhere
    latent = next(group for group in groups if "q_b_proj" in group.layers[0])
    assert latent.producer == "self_attn.q_a_layernorm"
    assert not latent.read_elsewhere


def observed_block(model: Path, index: int):
    stream = StreamedModel(model, torch.float32, torch.device("cpu"))
    stream.rehearse()
    hidden, arguments = stream.enter(torch.arange(2, 34)[None])
    block = stream.blocks[index]
    stream.load(block.module, block.name)
    return observe_block(block.module, hidden, arguments[index], batch_size=1), stream, hidden


@pytest.mark.parametrize(
    ("family", "settings"),
    [("gpt_oss", {**MOE, "head_dim": 16}), ("granitemoe", MOE)],
)
def test_experts_that_stay_in_one_tensor_are_named(family, settings, text, tmp_path):
    config = AutoConfig.for_model(family, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
    write_tokenizer(tmp_path / "m")
    request = job_for(tmp_path / "m", recipe_data(text), tmp_path / "out")
    plan = driver.plan(request)
    assert len(plan.stacked_experts) in {2, 4}
    driver.compress(request)
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    for name in plan.stacked_experts:
        assert f"{name}.0.down_proj" in entry["ignore"]
    base = logits_of(load_whole(tmp_path / "m"))
    assert (logits_of(load_whole(tmp_path / "out")) - base).norm() < base.norm()
    # As vLLM's gpt-oss renames what it reads, in paths but not in expressions.
    renamed = [
        name if name.startswith("re:") else re.sub(r"\.down_proj$", ".w2_weight", name)
        for name in entry["ignore"]
    ]
    for stack in plan.stacked_experts:
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            assert any(match_name(f"{stack}.0.{leaf}", one) for one in renamed), (stack, leaf)
    assert not any(match_name("model.layers.0.self_attn.q_proj", one) for one in renamed)
