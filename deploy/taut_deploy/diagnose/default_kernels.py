"""Which of taut's kernels a worker uses by default: where its kind was measured.

Decided by the model's ``config.json`` and the arguments for vLLM; the card is asked elsewhere
(:mod:`taut_deploy.worker`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from taut_deploy.cache_scheme import declared_cache
from taut_deploy.documents import read_json_object
from taut_deploy.errors import ModelError
from taut_deploy.vllm_flags import (
    ATTENTION_FLAGS,
    COMPILATION_FLAGS,
    GRAPH_FLAGS,
    MODEL_FLAGS,
    PARALLEL_FLAGS,
    SPECULATIVE_FLAGS,
    names_one_of,
)

PLAIN_ATTENTION = frozenset({"llama", "mistral", "phi3", "qwen2", "qwen3"})
"""``model_type`` of models whose every layer attends causally, at most in a window, with heads that
vLLM's FlashAttention takes. A backend that is named replaces vLLM's choice for the whole model, and
what others need (latent attention, sinks, mixed layers) is for vLLM to choose."""
_UNSAID = {"type": "int", "symmetric": True}
"""What compressed-tensors takes where a file does not say."""


def suits_decode_attention(
    config: Mapping[str, Any], kv_cache_dtype: str, extra: Sequence[str]
) -> bool:
    """Say whether a worker's attention is of the plain kind, and nobody chose a backend for it.

    Args:
        config: the model's ``config.json``.
        kv_cache_dtype: as vLLM spells it.
        extra: further arguments for vLLM.
    """
    from taut_kernels.for_deploy import ELEMENT_BYTES

    # A draft model may attend otherwise, and would get the backend of the model it drafts for.
    if names_one_of(extra, (*ATTENTION_FLAGS, *SPECULATIVE_FLAGS)):
        return False
    cache = declared_cache(config)
    if cache is not None and cache.get("strategy") != "tensor":
        return False  # scales a head: our backend has none, and vLLM would not start with it
    return str(config.get("model_type")) in PLAIN_ATTENTION and kv_cache_dtype in ELEMENT_BYTES


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
    return str(config.get("model_type")) in PLAIN_ATTENTION and has_measured_products(config)


def has_measured_products(config: Mapping[str, Any]) -> bool:
    """Say whether all quantised products are of one kind whose engines were measured.

    Int8 or FP8, by channel and, while running, by token, without zero points; or W4A16 in groups.
    Of dense weights in compressed-tensors' format.

    Args:
        config: the model's ``config.json``.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("sparsity_config"):
        return False
    found = quantization.get("config_groups")
    if not isinstance(found, dict) or not found:
        return False
    groups = list(found.values())
    if not all(isinstance(group, dict) for group in groups):
        return False
    return all(map(_is_8_bit, groups)) or all(map(_is_w4a16, groups))


def _is_w4a16(group: Mapping[str, Any]) -> bool:
    if group.get("input_activations") is not None:
        return False
    expected = {"num_bits": 4, "type": "int", "strategy": "group"}
    return _says(group.get("weights"), expected)


def _is_8_bit(group: Mapping[str, Any]) -> bool:
    weights = group.get("weights")
    if not isinstance(weights, dict):
        return False
    common = {"num_bits": 8, "type": weights.get("type", "int"), "symmetric": True}
    by_token = common | {"strategy": "token", "dynamic": True}
    return _says(weights, common | {"strategy": "channel"}) and _says(
        group.get("input_activations"), by_token
    )


def _says(found: object, expected: Mapping[str, Any]) -> bool:
    return isinstance(found, dict) and (_UNSAID | found).items() >= expected.items()


def config_of(model: Path) -> dict[str, Any]:
    """Return a model's ``config.json``; nothing where it cannot be read.

    Args:
        model: its directory.
    """
    try:
        return read_json_object(model / "config.json", ModelError)
    except (OSError, ModelError):
        return {}
