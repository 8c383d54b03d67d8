"""Single decoder blocks of several families, small and in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GemmaConfig, LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer, GemmaRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attn_implementation": "sdpa",
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding, {}),
    "llama with biases": (
        LlamaConfig,
        LlamaDecoderLayer,
        LlamaRotaryEmbedding,
        {"attention_bias": True, "mlp_bias": True},
    ),
    "gemma": (GemmaConfig, GemmaDecoderLayer, GemmaRotaryEmbedding, {}),
}


def make_block(family: str) -> tuple[nn.Module, torch.Tensor, dict[str, Any]]:
    """A random fp32 block with uneven norms and biases, an input, and its arguments."""
    config_type, block_type, rotary_type, extra = FAMILIES[family]
    torch.manual_seed(0)
    config = config_type(**SIZES, **extra)
    block = block_type(config, layer_idx=0).eval()
    for name, parameter in block.named_parameters():
        if name.endswith(("layernorm.weight", "bias")):
            parameter.data = torch.empty_like(parameter).uniform_(-0.5, 1.5)
    hidden = torch.randn(2, 10, 64)
    positions = torch.arange(10)[None]
    return block, hidden, {"position_embeddings": rotary_type(config)(hidden, positions)}
