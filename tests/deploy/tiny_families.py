"""Random models of many families, made of their configurations: seconds each, in fp32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from validate_setup import VOCABULARY, write_tokenizer

BYTES = 256 + 1

LLAMA = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
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
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FALCON = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
GROUPS = {"num_kv_heads": 2, "new_decoder_architecture": True}
OPT = {**LLAMA, "ffn_dim": 128, "word_embed_proj_dim": 64}
BLOOM = {**LLAMA, "n_layer": 2, "n_head": 2, "seq_length": 128}
ONE_GROUP = {"multi_query": True, "parallel_attn": True, "new_decoder_architecture": False}
ALIBI = {**ONE_GROUP, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}

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
}


def write_family(path: Path, family: str) -> Path:
    """A random model whose answers depend on its input, under the names it is published with.

    Args:
        path: directory to make.
        family: of :data:`FAMILIES`.
    """
    model_type, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
            elif "embed" not in name and "wte" not in name:
                parameter.copy_(torch.randn_like(parameter) / math.sqrt(parameter.shape[-1]))
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path)
    if settings["vocab_size"] == BYTES:
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
