"""Random models of many families, made of their configurations: seconds each, in fp32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from tiny_models import edit_json
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)
from validate_setup import VOCABULARY, write_tokenizer

BYTES = 256 + 1

# Heads of 32, the smallest that vLLM's attention takes on a CPU.
LLAMA = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
WIDE_HEADS = {**LLAMA, "head_dim": 32}
WINDOW = {**WIDE_HEADS, "sliding_window": 16}
GPT = {
    "vocab_size": len(VOCABULARY),
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FALCON = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
GROUPS = {"num_kv_heads": 2, "new_decoder_architecture": True}
OPT = {**LLAMA, "ffn_dim": 128, "word_embed_proj_dim": 128}
BLOOM = {**LLAMA, "n_layer": 2, "n_head": 4, "seq_length": 128}
ONE_GROUP = {"multi_query": True, "parallel_attn": True, "new_decoder_architecture": False}
ALIBI = {**ONE_GROUP, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
# Latent attention that vLLM serves as plain attention, heads of 16 + 16.
MINICPM3 = {
    **{name: value for name, value in LLAMA.items() if name != "num_key_value_heads"},
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "scale_emb": 6,
    "dim_model_base": 32,
}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}

MOE = {
    **LLAMA,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
LATENT = {
    **MOE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
# A block of linear attention, and one of softmax attention.
DELTA = {
    **MOE,
    "vocab_size": BYTES,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
LLAMA4 = {**MOE, "head_dim": 32, "intermediate_size_mlp": 128, "num_experts_per_tok": 1}

# By a name: model_type and configuration.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama with biases": ("llama", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", WINDOW),
    "ministral": ("ministral", WINDOW),
    "qwen2": ("qwen2", {**LLAMA, "vocab_size": BYTES, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", WIDE_HEADS),
    "gemma": ("gemma", WIDE_HEADS),
    "gemma2": ("gemma2", WINDOW),
    "gemma3": ("gemma3_text", WINDOW),
    "phi": ("phi", {**LLAMA, "num_key_value_heads": 4}),
    "phi3": ("phi3", {**LLAMA, "original_max_position_embeddings": 128}),
    "olmo": ("olmo", LLAMA),
    "olmo2": ("olmo2", LLAMA),
    "olmo3": ("olmo3", WINDOW),
    "stablelm": ("stablelm", {**LLAMA, "use_qkv_bias": True}),
    "falcon": ("falcon", {**FALCON, **ONE_GROUP}),
    "falcon with alibi": ("falcon", {**FALCON, **ALIBI}),
    "falcon with groups": ("falcon", {**FALCON, **GROUPS}),
    "gpt_neox": ("gpt_neox", LLAMA),
    "gpt2": ("gpt2", GPT),
    "opt": ("opt", OPT),
    "bloom": ("bloom", BLOOM),
    "starcoder2": ("starcoder2", {**LLAMA, "sliding_window": None}),
    "cohere": ("cohere", LLAMA),
    "cohere2": ("cohere2", WINDOW),
    "granite": ("granite", {**LLAMA, **GRANITE}),
    "smollm3": ("smollm3", LLAMA),
    "nemotron": ("nemotron", LLAMA),
    "glm4": ("glm4", WIDE_HEADS),
    "minicpm3": ("minicpm3", MINICPM3),
}

# Mixtures of experts; beside each, what files call an expert's matrix.
EXPERTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "mixtral": ("mixtral", MOE, "model.layers.1.block_sparse_moe.experts.3.w2"),
    "qwen2_moe": (
        "qwen2_moe",
        {**MOE, "vocab_size": BYTES, "shared_expert_intermediate_size": 64},
        "model.layers.1.mlp.experts.3.down_proj",
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**MOE, "head_dim": 32},
        "model.layers.1.mlp.experts.3.down_proj",
    ),
    "olmoe": ("olmoe", MOE, "model.layers.1.mlp.experts.3.down_proj"),
    "phimoe": ("phimoe", MOE, "model.layers.1.block_sparse_moe.experts.3.w2"),
    "deepseek_v2": ("deepseek_v2", LATENT, "model.layers.1.mlp.experts.3.down_proj"),
    "deepseek_v3": ("deepseek_v3", LATENT, "model.layers.1.mlp.experts.3.down_proj"),
    "llama4": ("llama4_text", LLAMA4, "model.layers.1.feed_forward.experts.3.down_proj"),
    "qwen3_next": ("qwen3_next", DELTA, "model.layers.1.mlp.experts.3.down_proj"),
}

# Whose experts stay in one tensor, and so dense.
STACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("gpt_oss", {**MOE, "head_dim": 32, "sliding_window": 16}),
}

# Published under another name than transformers' class, and vLLM has a class of that name.
PUBLISHED_AS = {"phimoe": "PhiMoEForCausalLM"}

CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 32,
}
PICTURES = {"depth": 1, "embed_dim": 32, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 2}
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
# Models with a vision part, whose text part is compressed.
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": (
        "llava",
        {
            "text_config": {"model_type": "llama", "attention_dropout": 0.5, **LLAMA},
            "vision_config": CLIP,
            "image_token_index": 5,
            "vision_feature_layer": -1,
        },
    ),
    "qwen2_vl": ("qwen2_vl", {"text_config": {**LLAMA, **MROPE}, "vision_config": PICTURES}),
}


def write_family(path: Path, family: str, dtype: torch.dtype = torch.float32, **sizes: int) -> Path:
    """A random model whose answers depend on its input, under the names it is published with.

    Args:
        path: directory to make.
        family: of :data:`FAMILIES`, :data:`EXPERTS`, :data:`STACKED` or :data:`VISION`.
        dtype: of the weights on disk.
        sizes: of the configuration, in place of the family's.
    """
    plain = {**FAMILIES, **STACKED, **VISION}
    model_type, settings = plain.get(family) or EXPERTS[family][:2]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**settings, **sizes})
    build = AutoModelForImageTextToText if family in VISION else AutoModelForCausalLM
    model = build.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
            elif "embed" not in name and "wte" not in name:
                parameter.copy_(torch.randn_like(parameter) / math.sqrt(parameter.shape[-1]))
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.to(dtype).save_pretrained(path)
    if family in PUBLISHED_AS:
        edit_json(path / "config.json", architectures=[PUBLISHED_AS[family]])
    if settings.get("vocab_size") == BYTES:
        _write_bytes_tokenizer(path)
    else:
        write_tokenizer(path)
    return path


def _write_bytes_tokenizer(path: Path) -> None:
    """One token a byte, for families whose tokenizer class brings its own idea of words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"<|endoftext|>": 256} | {letter: index for index, letter in enumerate(letters)}
    core = Tokenizer(models.BPE(words, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    end = "<|endoftext|>"
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=end, eos_token=end)
    wrapped.save_pretrained(path)
