"""A model's depth costs no memory: a block is held at a time, whatever the checkpoint's size.

Scaled down from a checkpoint of several GB, so that it takes seconds: what is asserted is a
difference between two depths, which the libraries' own memory is no part of.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import write_calibration_text
from transformers import LlamaConfig
from validate_setup import VOCABULARY, write_tokenizer

WIDTH, INNER = 768, 2048
BLOCK_BYTES = 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER)


def write_deep(path: Path, layers: int) -> int:
    """A bf16 Llama of equal blocks, one a shard; bytes of its blocks."""
    path.mkdir()
    sizes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH)}
    wide = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    torch.manual_seed(0)
    linears = {f"self_attn.{name}_proj": size for name, size in sizes.items()}
    linears |= {f"mlp.{name}_proj": size for name, size in wide.items()}
    block = {
        f"{name}.weight": (torch.randn(size) / 30).bfloat16() for name, size in linears.items()
    }
    for norm in ("input_layernorm", "post_attention_layernorm"):
        block[f"{norm}.weight"] = torch.ones(WIDTH, dtype=torch.bfloat16)
    embedding = torch.randn(len(VOCABULARY), WIDTH).bfloat16()
    outer = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding.clone(),
        "model.norm.weight": torch.ones(WIDTH, dtype=torch.bfloat16),
    }
    shards = [outer]
    shards += [{f"model.layers.{i}.{name}": t for name, t in block.items()} for i in range(layers)]
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, path / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=128,
        architectures=["LlamaForCausalLM"],
        tie_word_embeddings=False,
        dtype="bfloat16",
    ).save_pretrained(path)
    write_tokenizer(path)
    return layers * BLOCK_BYTES


@pytest.mark.timeout(900)
def test_the_peak_does_not_grow_with_depth(tmp_path):
    text = write_calibration_text(tmp_path / "text.txt")
    peaks, sizes = [], []
    for layers in (2, 20):
        model = tmp_path / f"model-{layers}"
        sizes.append(write_deep(model, layers))
        script = Path(__file__).with_name("peak_memory.py")
        argv = [sys.executable, str(script), str(model), str(text), str(tmp_path / f"o-{layers}")]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        peaks.append(int(done.stdout))
    grown, more = peaks[1] - peaks[0], sizes[1] - sizes[0]
    print(f"{more / 1e6:.0f} MB more of a model take {grown / 1e6:.0f} MB more of memory")
    assert more > 250e6
    assert grown < 2 * BLOCK_BYTES < 0.12 * more
