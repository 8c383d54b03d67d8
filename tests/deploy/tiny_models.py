"""Tiny random models, texts and recipes for the tests of the pipeline; no real LLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from validate_setup import VOCABULARY, write_text, write_tokenizer

from taut_deploy.compress.driver import CompressionJob
from taut_deploy.models.store import describe_directory
from taut_deploy.recipe import Recipe, parse_recipe

CALIBRATION = {"source": "file", "sequences": 6, "sequence_length": 32, "seed": 1}


def write_llama(
    path: Path,
    *,
    hidden: int = 64,
    intermediate: int = 128,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    tie: bool = False,
    shard_bytes: int | None = None,
) -> Path:
    """A random Llama with grouped-query attention (4 heads on 2) and uneven norms.

    Args:
        path: directory to make.
        hidden: width of the residual stream.
        intermediate: width of the MLP.
        layers: decoder blocks.
        dtype: dtype of the weights on disk.
        tie: whether embeddings and head share their weight.
        shard_bytes: largest shard; None writes one file.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=tie,
        dtype=dtype,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data = torch.empty_like(parameter).uniform_(0.5, 2.0)
    limits = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    model.to(dtype).save_pretrained(path, **limits)
    write_tokenizer(path)
    return path


def write_llama_with_idle_block(path: Path, share: float) -> Path:
    """A model of three blocks, what the second one writes multiplied by ``share``."""
    write_llama(path, layers=3)
    model = AutoModelForCausalLM.from_pretrained(path)
    for part in (model.model.layers[1].self_attn.o_proj, model.model.layers[1].mlp.down_proj):
        part.weight.data *= share
    model.save_pretrained(path)
    return path


def recipe_data(text: Path, **quantize: Any) -> dict[str, Any]:
    """A recipe as plain data, calibrated on ``text``; ``quantize`` changes the one stage."""
    stage = {"method": "quantize", "scheme": "W4A16", "group_size": 32, **quantize}
    return {
        "name": "tiny",
        "calibration": {**CALIBRATION, "path": str(text)},
        "stages": [{key: value for key, value in stage.items() if value is not None}],
    }


def w8a8_data(text: Path, algorithm: str = "rtn") -> dict[str, Any]:
    """The recipe of the default scheme: smoothing, then W8A8."""
    data = recipe_data(text, scheme="W8A8", group_size=None, algorithm=algorithm)
    data["stages"].insert(0, {"method": "smooth", "alpha": "auto"})
    return data


def pruned_data(text: Path, *later: dict[str, Any], **prune: Any) -> dict[str, Any]:
    """A recipe that prunes, and then does what ``later`` says."""
    return {**recipe_data(text), "stages": [{"method": "prune", **prune}, *later]}


def make_recipe(data: dict[str, Any]) -> Recipe:
    """Parse recipe data as a recipe file would be."""
    return parse_recipe(yaml.safe_dump(data), "test")


def write_recipe(path: Path, data: dict[str, Any]) -> Path:
    """Write recipe data as a recipe file."""
    path.write_text(yaml.safe_dump(data))
    return path


def job_for(model: Path, data: dict[str, Any], output: Path) -> CompressionJob:
    """A compression job on the CPU."""
    record = describe_directory(model)
    return CompressionJob(record, make_recipe(data), output, output.parent / "cache")


def write_calibration_text(path: Path) -> Path:
    """Enough text for every recipe here."""
    return write_text(path, 400, seed=5)


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON object on disk; a value of None removes its key."""
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
