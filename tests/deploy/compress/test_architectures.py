"""Families that no table names: decided by their structure, and read back by others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stood_for import load_whole, logits_of, plain_copy, says_golden, stored
from tiny_families import FAMILIES, LLAMA, write_family
from tiny_minicpm import AS_GRANITE, write_minicpm
from tiny_models import edit_json, job_for, recipe_data, write_calibration_text, write_llama
from transformers import AutoConfig, AutoModelForCausalLM
from validate_setup import write_tokenizer

from taut_deploy.compress import driver
from taut_deploy.compress.workspace import Workspace
from taut_deploy.errors import ModelError, RecipeError
from taut_deploy.models.directory import read_shape

# transformers' layers hold these weights transposed; servers turn them when they load.
TURNED = {"gpt2"}
# transformers 5.19 reads no packed weights of these: its quantisation looks for ``nn.Linear``, and
# Falcon initialises ``weight`` of layers that have none then. The weights are multiplied out here.
UNREAD = {"gpt2", "falcon", "falcon with alibi", "falcon with groups"}
SCHEMES = {
    "W8A16": {"scheme": "W8A16", "group_size": 32, "algorithm": "rtn"},
    "W4A16": {"scheme": "W4A16", "group_size": 32, "algorithm": "gptq"},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_calibration_text(tmp_path_factory.mktemp("room") / "text.txt")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """A family's model, made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = write_family(tmp_path_factory.mktemp("family") / "model", family)
        return made[family]

    return get


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_compressed_and_read_by_transformers(family, scheme, model_of, text, tmp_path):
    model = model_of(family)
    assert read_shape(model).num_layers == 2
    manifest = driver.compress(
        job_for(model, recipe_data(text, **SCHEMES[scheme]), tmp_path / "out")
    )
    bits = int(scheme[1])
    plain = load_whole(plain_copy(tmp_path / "out", tmp_path / "p", bits, turned=family in TURNED))

    # Block by block as it was compressed, the model said what it says as a whole.
    says_golden(plain, tmp_path / "out", manifest.golden)

    base, multiplied_out = logits_of(load_whole(model)), logits_of(plain)
    change = float((multiplied_out - base).norm() / base.norm())
    assert 0 < change < {"W8A16": 0.05, "W4A16": 0.6}[scheme]
    if family not in UNREAD:
        torch.testing.assert_close(
            logits_of(load_whole(tmp_path / "out")), multiplied_out, atol=1e-4, rtol=1e-4
        )


def test_every_linear_layer_of_the_blocks_is_compressed(model_of, text, tmp_path):
    """Against transformers' own count of them, in families whose forwards differ most."""
    for family in ("stablelm", "falcon with alibi", "gpt_neox", "opt"):
        model = model_of(family)
        blocks = AutoModelForCausalLM.from_pretrained(model).base_model
        linears = {
            id(module): name
            for name, module in blocks.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        plan = driver.plan(job_for(model, recipe_data(text), tmp_path / "out"))
        assert len(plan.layers) == len(linears), family
        assert all(layer.scheme == "W4A16" for layer in plan.layers)


def test_codes_under_a_stored_name_have_its_orientation(model_of, text, tmp_path):
    """vLLM transposes GPT-2's ``c_attn.weight``, whatever it holds, and not its scales."""
    data = recipe_data(text, scheme="W8A8", group_size=None, algorithm="rtn")
    driver.compress(job_for(model_of("gpt2"), data, tmp_path / "out"))
    found = stored(tmp_path / "out")
    layer = "transformer.h.0.attn.c_attn"
    codes, scale = found[f"{layer}.weight"], found[f"{layer}.weight_scale"]
    assert codes.dtype is torch.int8
    assert codes.shape == (128, 384)
    base = stored_weight(model_of("gpt2"), f"{layer}.weight")
    assert scale.shape == (384, 1)
    assert ((codes.float() * scale.T - base).abs() <= scale.T * 0.51).all()


def stored_weight(model: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as handle:
        return handle.get_tensor(name)


def test_what_stays_dense_is_named_as_it_is_stored(model_of, text, tmp_path):
    driver.compress(job_for(model_of("gpt_neox"), recipe_data(text), tmp_path / "out"))
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {"lm_head", "embed_out"} == set(entry["ignore"])


REFUSED = {
    "bert": (
        {"vocab_size": 62, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        "AutoModelForMaskedLM",
        "model_type 'bert' is no causal LM .*does not generate text",
    ),
    "t5": (
        {"vocab_size": 62, "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4},
        "AutoModelForSeq2SeqLM",
        "model_type 't5' is no causal LM .*an encoder and a decoder",
    ),
    "mamba": (
        {"vocab_size": 62, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
        "AutoModelForCausalLM",
        "'mamba' is not supported .*hold no attention",
    ),
    "gemma3n_text": (
        {
            **LLAMA,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 62,
            "num_kv_shared_layers": 0,
            "laurel_rank": 8,
            "activation_sparsity_pattern": None,
            "head_dim": 16,
        },
        "AutoModelForCausalLM",
        "'gemma3n_text' cannot be compressed block by block .*take a model of another arch",
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_compressed_is_refused_in_the_plan(family, text, tmp_path):
    import transformers

    settings, builder, message = REFUSED[family]
    config = AutoConfig.for_model(family, **settings)
    getattr(transformers, builder).from_config(config).save_pretrained(tmp_path / "m")
    write_tokenizer(tmp_path / "m")
    with pytest.raises(ModelError, match=message) as refused:
        driver.plan(job_for(tmp_path / "m", recipe_data(text), tmp_path / "out"))
    assert "\n" not in str(refused.value)
    assert str(tmp_path / "m") in str(refused.value)


def test_a_batch_is_calibrated_as_its_rows_alone(model_of):
    """ALiBi of some families is as long as the batch: what was recorded of one row must fit."""
    from taut_deploy.compress.source.calls import call_block
    from taut_deploy.compress.source.stream import StreamedModel

    ids = torch.randint(2, 60, (3, 24), generator=torch.Generator().manual_seed(1))
    for family in ("falcon with alibi", "bloom", "opt", "mistral"):
        stream = StreamedModel(model_of(family), torch.float32, torch.device("cpu"))
        stream.rehearse()
        hidden, arguments = stream.enter(ids)
        with torch.inference_mode():
            for block in stream.blocks:
                stream.load(block.module, block.name)
                hidden = call_block(block.module, hidden, arguments[block.index])
            whole = load_whole(model_of(family))(ids).logits
        torch.testing.assert_close(stream.leave(hidden), whole, atol=1e-4, rtol=1e-4)


def test_code_of_the_models_own_runs_only_when_asked_for(text, tmp_path):
    """As MiniCPM is published: a class beside the weights."""
    model = write_llama(tmp_path / "m")
    (model / "modeling_own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    edit_json(
        model / "config.json",
        model_type="own",
        architectures=["OwnForCausalLM"],
        auto_map={
            "AutoConfig": "modeling_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    )
    request = job_for(model, recipe_data(text), tmp_path / "out")
    with pytest.raises(ModelError, match=r"modeling_own\.py.*add --trust-remote-code"):
        driver.plan(request)
    trusted = replace(request, trust_remote_code=True)
    assert len(driver.compress(trusted).layers) == 14


def test_minicpm_is_compressed_by_the_class_beside_its_weights(text, tmp_path):
    """Its scales of embeddings, residuals and logits are those of a Granite, which is the judge."""
    model = write_minicpm(tmp_path / "m")
    request = replace(job_for(model, recipe_data(text), tmp_path / "out"), trust_remote_code=True)
    manifest = driver.compress(request)
    assert len(manifest.layers) == 2 * 7
    plain = plain_copy(tmp_path / "out", tmp_path / "plain", 4, turned=False)
    edit_json(plain / "config.json", **AS_GRANITE)
    says_golden(load_whole(plain), tmp_path / "out", manifest.golden)


@pytest.mark.parametrize("action", ["plan", "compress"])
def test_a_forward_that_fails_inside_a_block_is_refused_by_both(action, text, tmp_path):
    """Falcon's old blocks ignore ``num_kv_heads`` where they count heads, and not elsewhere."""
    settings = {**FAMILIES["falcon with alibi"][1], "num_kv_heads": 2}
    config = AutoConfig.for_model("falcon", **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
    write_tokenizer(tmp_path / "m")
    with pytest.raises(ModelError, match=r"cannot be compressed block by block \(shape"):
        getattr(driver, action)(job_for(tmp_path / "m", recipe_data(text), tmp_path / "out"))


def test_a_plan_tries_a_block_to_its_file_and_leaves_nothing(model_of, text, tmp_path, monkeypatch):
    written = []
    real = Workspace.save_shard

    def watch(workspace, name, tensors):
        real(workspace, name, tensors)
        written.append((workspace.directory, sorted(tensors)))

    monkeypatch.setattr(Workspace, "save_shard", watch)
    driver.plan(job_for(model_of("gpt_neox"), recipe_data(text), tmp_path / "out"))
    (directory, names), (_, outer) = written
    assert "gpt_neox.layers.0.attention.query_key_value.weight_packed" in names
    assert "gpt_neox.embed_in.weight" in outer
    assert not directory.parent.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_plan_refuses_a_text_that_is_too_short(model_of, tmp_path):
    (tmp_path / "t.txt").write_text("w1 w2 w3")
    with pytest.raises(RecipeError, match=r"gives 0 sequences of 32 tokens"):
        driver.plan(job_for(model_of("llama"), recipe_data(tmp_path / "t.txt"), tmp_path / "out"))
