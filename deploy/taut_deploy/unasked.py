"""Which of taut's kernels a worker uses without being told to: where its kind was measured.

Decided by the model's ``config.json`` and the arguments for vLLM; the card is asked elsewhere
(:mod:`taut_deploy.worker`).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from taut_deploy.vllm_flags import (
    ATTENTION_FLAGS,
    COMPILATION_FLAGS,
    GRAPH_FLAGS,
    MODEL_FLAGS,
    PARALLEL_FLAGS,
    SPECULATIVE_FLAGS,
    names_one_of,
)

PLAIN_ATTENTION = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""``model_type`` of models whose every layer attends causally, at most in a window, with heads that
vLLM's FlashAttention takes. A backend that is named replaces vLLM's choice for the whole model, and
what others need (latent attention, sinks, mixed layers) is for vLLM to choose."""


def suits_decode_attention(
    config: Mapping[str, Any], kv_cache_dtype: str, extra: Sequence[str]
) -> bool:
    """Say whether a worker's attention is of the plain kind, and nobody chose a backend for it.

    Args:
        config: the model's ``config.json``.
        kv_cache_dtype: as vLLM spells it.
        extra: further arguments for vLLM.
    """
    from taut_kernels.vllm_plugin.decode_attention import ELEMENT_BYTES

    # A draft model may attend otherwise, and would get the backend of the model it drafts for.
    if names_one_of(extra, (*ATTENTION_FLAGS, *SPECULATIVE_FLAGS)):
        return False
    return config.get("model_type") in PLAIN_ATTENTION and kv_cache_dtype in ELEMENT_BYTES


def suits_fused_ops(config: Mapping[str, Any], extra: Sequence[str]) -> bool:
    """Say whether a worker is of the kind whose engines were faster with fused ops.

    With several cards they never ran: vLLM's own all-reduce with a norm is off beside them. Nor did
    they with LoRA, whose kernels start early and do not wait. Naming a number of cards is enough,
    even of one.

    Args:
        config: the model's ``config.json``.
        extra: further arguments for vLLM.
    """
    telling = (*GRAPH_FLAGS, *COMPILATION_FLAGS, *PARALLEL_FLAGS, *SPECULATIVE_FLAGS)
    if names_one_of(extra, (*telling, *MODEL_FLAGS)):
        return False
    return config.get("model_type") in PLAIN_ATTENTION and has_8_bit_products(config)


def has_8_bit_products(config: Mapping[str, Any]) -> bool:
    """Say whether all quantised products are int8 or FP8, by channel and, while running, by token.

    Of dense weights, without zero points, and both operands of one type.

    Args:
        config: the model's ``config.json``.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("sparsity_config"):
        return False
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return False
    return all(isinstance(group, dict) and _is_8_bit(group) for group in groups.values())


def _is_8_bit(group: Mapping[str, Any]) -> bool:
    weights, activations = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict) or not isinstance(activations, dict):
        return False
    common = {"num_bits": 8, "type": weights.get("type", "int"), "symmetric": True}
    by_token = common | {"strategy": "token", "dynamic": True}
    # What compressed-tensors takes where a file does not say.
    default = {"type": "int", "symmetric": True}
    return all(
        (default | found).get(key) == value
        for found, expected in (
            (weights, common | {"strategy": "channel"}),
            (activations, by_token),
        )
        for key, value in expected.items()
    )


def config_of(model: Path) -> dict[str, Any]:
    """Return a model's ``config.json``; nothing where it cannot be read.

    Args:
        model: its directory.
    """
    try:
        found = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
