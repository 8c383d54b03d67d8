"""What a checkpoint says of its KV cache."""

from collections.abc import Mapping
from typing import Any

INT8_CACHE = "int8_per_token_head"
"""What vLLM calls a cache in INT8 with a scale for every token and head."""


def declared_cache(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How ``config.json`` says that keys and values are kept; None where it does not.

    vLLM follows it wherever ``--kv-cache-dtype`` is ``auto``: the cache is FP8 then.

    Args:
        config: the model's ``config.json``.
    """
    entry = config.get("quantization_config")
    found = entry.get("kv_cache_scheme") if isinstance(entry, Mapping) else None
    return found if isinstance(found, Mapping) else None


def asked_cache(recipe: Mapping[str, Any]) -> str | None:
    """The ``--kv-cache-dtype`` that a recipe asks for and ``config.json`` cannot say, or None.

    Args:
        recipe: of a checkpoint's manifest.
    """
    found = recipe.get("kv_cache")
    return INT8_CACHE if isinstance(found, Mapping) and found.get("dtype") == "int8" else None
