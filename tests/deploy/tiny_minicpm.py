"""A tiny MiniCPM as it is published: its class is Python code beside the weights."""

from __future__ import annotations

import json
import math
import sys
from importlib import util
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_families import LLAMA
from validate_setup import write_tokenizer

SCALES = {"scale_emb": 6, "scale_depth": 1.4, "dim_model_base": 32}
SETTINGS = {**LLAMA, **SCALES, "hidden_act": "silu", "rms_norm_eps": 1e-5}

AS_GRANITE: dict[str, Any] = {
    "model_type": "granite",
    "architectures": ["GraniteForCausalLM"],
    "auto_map": None,
    "embedding_multiplier": SCALES["scale_emb"],
    "residual_multiplier": SCALES["scale_depth"] / math.sqrt(LLAMA["num_hidden_layers"]),
    "logits_scaling": LLAMA["hidden_size"] / SCALES["dim_model_base"],
    "attention_multiplier": (LLAMA["hidden_size"] // LLAMA["num_attention_heads"]) ** -0.5,
}
"""What makes a Granite of its configuration that computes the same: transformers has the class."""

CODE = """
import math
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class MiniCPMConfig(LlamaConfig):
    model_type = "minicpm"
    scale_emb: float = 1
    scale_depth: float = 1
    dim_model_base: int = 1


class Embedding(nn.Embedding):
    factor = 1.0

    def forward(self, ids):
        return super().forward(ids) * self.factor


class Head(nn.Linear):
    factor = 1.0

    def forward(self, hidden):
        return super().forward(hidden / self.factor)


class Layer(LlamaDecoderLayer):
    def __init__(self, config, index):
        super().__init__(config, index)
        self.depth = config.scale_depth / math.sqrt(config.num_hidden_layers)

    def forward(self, hidden_states, **rest):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **rest)
        hidden_states = hidden_states + attended * self.depth
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)) * self.depth


class MiniCPMForCausalLM(LlamaForCausalLM):
    config_class = MiniCPMConfig

    def __init__(self, config):
        super().__init__(config)
        sizes = config.vocab_size, config.hidden_size
        self.model.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.model.embed_tokens = Embedding(*sizes)
        self.model.embed_tokens.factor = config.scale_emb
        self.lm_head = Head(*reversed(sizes), bias=False)
        self.lm_head.factor = config.hidden_size / config.dim_model_base
        self.post_init()
"""


def write_minicpm(path: Path) -> Path:
    """A random model of two blocks.

    Args:
        path: directory to make.
    """
    path.mkdir()
    module = path / "modeling_minicpm.py"
    module.write_text(CODE)
    spec = util.spec_from_file_location("modeling_minicpm", module)
    assert spec is not None
    assert spec.loader is not None
    code = util.module_from_spec(spec)
    sys.modules["modeling_minicpm"] = code
    spec.loader.exec_module(code)
    config = code.MiniCPMConfig(**SETTINGS)
    torch.manual_seed(0)
    model = code.MiniCPMForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                wide = 0.2 if "embed" in name else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn_like(parameter) * wide)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    document = {
        **config.to_dict(),
        **SETTINGS,
        "architectures": ["MiniCPMForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_minicpm.MiniCPMConfig",
            "AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM",
        },
    }
    (path / "config.json").write_text(json.dumps(document))
    write_tokenizer(path)
    return path
