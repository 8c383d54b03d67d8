"""``taut slim``: dead units are dropped without a trace, and what cannot be said is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)
from validate_setup import VOCABULARY, write_text, write_tokenizer

from taut_deploy.checkpoint import verify
from taut_deploy.compress.shrink.shrink import ShrinkJob, shrink
from taut_deploy.errors import ModelError, OutputError
from taut_deploy.models.store import describe_directory

SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, head_dim=16),
    "llama tied": lambda: LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16, use_sliding_window=False),
    "gemma": lambda: GemmaConfig(**SIZES, head_dim=16),
    "phi3 (gate and up in one)": lambda: Phi3Config(**SIZES),
}
IDS = torch.arange(2, 50)[None]


def random_model(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return model


def save(model, path: Path) -> Path:
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa").eval()
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt", 600, seed=2)


def job(model: Path, output: Path, text: Path, **shares) -> ShrinkJob:
    record = describe_directory(model)
    return ShrinkJob(record, output, shares, (str(text),), output.parent, 4, 32)


@pytest.mark.parametrize("name", CONFIGS)
def test_neurons_that_are_zero_are_dropped_and_the_logits_stay(name, tmp_path, text):
    model = random_model(CONFIGS[name]())
    torch.manual_seed(1)
    for block in model.model.layers:
        block.mlp.down_proj.weight.data[:, torch.randperm(128)[:32]] = 0
    base = save(model, tmp_path / "base")
    manifest = shrink(job(base, tmp_path / "out", text, ffn=0.75))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["intermediate_size"] == 96
    torch.testing.assert_close(logits(tmp_path / "out"), logits(base), rtol=1e-4, atol=1e-4)
    verify(tmp_path / "out")
    assert len(manifest.layers) == 4
    assert len({tuple(layer["kept"]) for layer in manifest.layers}) == 4, "each block its own"


@pytest.mark.parametrize("name", [name for name in CONFIGS if "phi3" not in name])
def test_a_dead_group_of_heads_is_found(name, tmp_path, text):
    model = random_model(CONFIGS[name]())
    for index, block in enumerate(model.model.layers):
        for dead in (index, (index + 2) % 4):  # two query heads of 16 channels read one key head
            block.self_attn.o_proj.weight.data[:, dead * 32 : dead * 32 + 32] = 0
    base = save(model, tmp_path / "base")
    manifest = shrink(job(base, tmp_path / "out", text, heads=0.5))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    sizes = (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"])
    assert sizes == (4, 2, 16)
    kept = [layer["kept"] for layer in manifest.layers]
    assert kept == [[1, 3], [0, 2], [1, 3], [0, 2]]
    torch.testing.assert_close(logits(tmp_path / "out"), logits(base), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "llama tied", "qwen3"])
def test_channels_that_are_zero_are_dropped_and_the_logits_stay(name, tmp_path, text):
    model = random_model(CONFIGS[name]())
    dead = torch.randperm(64, generator=torch.Generator().manual_seed(3))[:16]
    model.model.embed_tokens.weight.data[:, dead] = 0
    for block in model.model.layers:
        block.mlp.down_proj.weight.data[dead] = 0
        block.self_attn.o_proj.weight.data[dead] = 0
    base = save(model, tmp_path / "base")
    shrink(job(base, tmp_path / "out", text, hidden=0.75))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["hidden_size"] == 48
    torch.testing.assert_close(logits(tmp_path / "out"), logits(base), rtol=1e-3, atol=1e-3)


def test_blocks_that_change_nothing_are_dropped_and_the_logits_stay(tmp_path, text):
    config = CONFIGS["qwen3"]()
    model = random_model(config)
    still = model.model.layers[1]
    still.mlp.down_proj.weight.data.zero_()
    still.self_attn.o_proj.weight.data.zero_()
    base = save(model, tmp_path / "base")
    manifest = shrink(job(base, tmp_path / "out", text, depth=0.75))
    assert manifest.layers[0]["kept"] == [0, 2, 3]
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["num_hidden_layers"] == 3 and len(written["layer_types"]) == 3
    torch.testing.assert_close(logits(tmp_path / "out"), logits(base), rtol=1e-4, atol=1e-4)
    losses = manifest.recipe["held_out_cross_entropy"]
    assert losses["depth"] == pytest.approx(losses["base"], abs=1e-4)


def test_all_axes_at_once_give_a_model_that_loads(tmp_path, text):
    base = save(random_model(CONFIGS["llama"]()), tmp_path / "base")
    asked = job(base, tmp_path / "out", text, ffn=0.5, heads=0.5, hidden=0.5, depth=0.5)
    first = shrink(asked)
    assert logits(tmp_path / "out").shape == (1, 48, len(VOCABULARY))
    assert shrink(asked).digest == first.digest, "a finished one is returned as it is"
    with pytest.raises(OutputError, match="holds something else"):
        shrink(dataclasses.replace(asked, shares={"ffn": 0.5}))


@pytest.mark.parametrize(
    ("config", "shares", "message"),
    [
        (
            Qwen2Config(**SIZES),
            {"heads": 0.5},
            "'qwen2' has no head_dim",
        ),
        (GemmaConfig(**SIZES, head_dim=16), {"hidden": 0.5}, "scales its embeddings"),
        (Phi3Config(**SIZES), {"heads": 0.5}, "no head_dim|cannot be shrunk"),
        (
            MixtralConfig(**SIZES, num_local_experts=4, head_dim=16),
            {"ffn": 0.5},
            "experts in one tensor",
        ),
        (
            GPTNeoXConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
            {"heads": 0.5},
            "no head_dim",
        ),
        (LlamaConfig(**SIZES), {"ffn": 1.5}, "--ffn 1.5: give the share to keep"),
        (LlamaConfig(**SIZES), {"heads": 0.95}, "--heads 0.95: leaves all 4 units"),
        (LlamaConfig(**SIZES), {"heads": 0.75}, "not a multiple of the number of attention heads"),
        (LlamaConfig(**SIZES), {}, "nothing to shrink"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_what_a_configuration_cannot_say_is_refused(config, shares, message, tmp_path, text):
    base = save(random_model(config), tmp_path / "base")
    with pytest.raises(ModelError, match=message):
        shrink(job(base, tmp_path / "out", text, **shares))
    assert not (tmp_path / "out").exists()


def test_a_layout_that_would_be_cut_wrongly_is_refused_by_running_it(tmp_path, text):
    """Every shape fits, the values do not."""
    model = random_model(Phi3Config(**SIZES))
    base = save(model, tmp_path / "base")
    from taut_deploy.compress.shrink import cut as module

    right = module._spread
    try:
        module._spread = lambda units, width: [0] * (len(units) * width)
        with pytest.raises(ModelError, match="computes something else"):
            shrink(job(base, tmp_path / "out", text, ffn=0.5))
    finally:
        module._spread = right
