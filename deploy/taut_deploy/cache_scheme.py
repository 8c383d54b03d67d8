"""What a checkpoint says of its KV cache."""

from collections.abc import Mapping
from typing import Any


def declared_cache(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How ``config.json`` says that keys and values are kept; None where it does not.

    vLLM follows it wherever ``--kv-cache-dtype`` is ``auto``: the cache is FP8 then.

    Args:
        config: the model's ``config.json``.
    """
    entry = config.get("quantization_config")
    found = entry.get("kv_cache_scheme") if isinstance(entry, Mapping) else None
    return found if isinstance(found, Mapping) else None
