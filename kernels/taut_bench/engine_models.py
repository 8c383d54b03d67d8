"""Published configurations of the models that engines are measured with (``config.json`` keys)."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _decoder(kind: str, name: str, hidden: int, intermediate: int, **others: Any) -> Config:
    """Return a configuration: what most decoders have, and what this one has of its own."""
    return {
        "architectures": [name],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    } | others


def _attention(layers: int, heads: int, kv_heads: int) -> Config:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


_LLAMA_3: Config = {
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_QWEN: Config = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "bos_token_id": 0, "eos_token_id": 1}
LLAMA_3_8B = _decoder("llama", "LlamaForCausalLM", 4096, 14336, **_attention(32, 32, 8), **_LLAMA_3)
ENGINE_MODELS: dict[str, Config] = {
    "llama3-8b": LLAMA_3_8B,
    "llama3.2-1b": _decoder(
        "llama",
        "LlamaForCausalLM",
        2048,
        8192,
        **_attention(16, 32, 8),
        **_LLAMA_3,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "llama3-70b": _decoder(
        "llama", "LlamaForCausalLM", 8192, 28672, **_attention(80, 64, 8), **_LLAMA_3
    ),
    "qwen2.5-7b": _decoder(
        "qwen2",
        "Qwen2ForCausalLM",
        3584,
        18944,
        **_attention(28, 28, 4),
        **_QWEN,
        vocab_size=152064,
    ),
    "qwen3-4b": _decoder(
        "qwen3",
        "Qwen3ForCausalLM",
        2560,
        9728,
        **_attention(36, 32, 8),
        **_QWEN,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": _decoder(
        "qwen3",
        "Qwen3ForCausalLM",
        4096,
        12288,
        **_attention(36, 32, 8),
        **_QWEN,
        vocab_size=151936,
    ),
    "mistral-small-24b": _decoder(
        "mistral",
        "MistralForCausalLM",
        5120,
        32768,
        **_attention(40, 32, 8),
        vocab_size=131072,
        rope_theta=1e8,
        sliding_window=None,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gemma2-9b": _decoder(
        "gemma2",
        "Gemma2ForCausalLM",
        3584,
        14336,
        **_attention(42, 16, 8),
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        vocab_size=256000,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    ),
    "phi4": _decoder(
        "phi3",
        "Phi3ForCausalLM",
        5120,
        17920,
        **_attention(40, 40, 10),
        vocab_size=100352,
        rope_theta=250000.0,
        sliding_window=None,
        original_max_position_embeddings=16384,
        max_position_embeddings=16384,
        bos_token_id=100257,
        eos_token_id=100257,
        pad_token_id=100349,
    ),
}
"""By the names of :mod:`taut_bench.model_sizes`."""
