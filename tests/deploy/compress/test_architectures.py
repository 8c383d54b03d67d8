"""Families that no table names: decided by their structure, and read back by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import job_for, recipe_data, write_calibration_text
from transformers import AutoConfig, AutoModelForCausalLM
from validate_setup import VOCABULARY, write_tokenizer

from taut_deploy.compress import driver
from taut_deploy.models.directory import read_shape

SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
FAMILIES = ("gemma2", "gemma3_text", "glm4", "nemotron", "olmo2", "olmo3")


def write_model(path: Path, family: str) -> Path:
    """A random model of a family, fp32."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES)
    config.initializer_range = 0.1
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    write_tokenizer(path)
    return path


def logits(path: Path) -> torch.Tensor:
    ids = torch.randint(2, 60, (2, 20), generator=torch.Generator().manual_seed(9))
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(ids).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_no_table_names_is_compressed_and_loaded(family, tmp_path):
    model = write_model(tmp_path / "model", family)
    assert read_shape(model).num_layers == 2
    text = write_calibration_text(tmp_path / "text.txt")
    data = recipe_data(text, scheme="W8A16", group_size=32, algorithm="rtn")
    manifest = driver.compress(job_for(model, data, tmp_path / "out"))
    assert {layer["name"].split(".")[2] for layer in manifest.layers} == {"0", "1"}
    base = logits(model)
    change = (logits(tmp_path / "out") - base).norm() / base.norm()
    assert 0 < change < 0.1
