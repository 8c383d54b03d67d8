"""How large a candidate may be: bytes of its weights, or memory of the device that serves it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from taut_deploy.cache_scheme import INT8_CACHE
from taut_deploy.errors import RecipeError
from taut_deploy.recipe import Recipe, parse_size
from taut_deploy.sizing import GIB, Demand, kv_bytes_per_token


@dataclass(frozen=True)
class SizeLimit:
    """The most that a candidate may take.

    Args:
        flag: as the user wrote it, for messages.
        bytes: the most.
        of: what is counted: weight files, or weights as loaded with the KV cache of one request.
    """

    flag: str
    bytes: int
    of: Literal["weights", "memory"]


def read_limit(memory: str | None, target_bytes: str | None) -> SizeLimit | None:
    """The limit of ``--memory`` or ``--target-bytes``; None without either.

    Of a device's memory the share that :class:`taut_deploy.sizing.Demand` reserves is left to the
    process, activations and CUDA graphs.

    Raises:
        RecipeError: both are given, one is no size, or the memory is all reserve.
    """
    if memory is not None and target_bytes is not None:
        raise RecipeError("--memory and --target-bytes: give one of them")
    if target_bytes is not None:
        size = parse_size(target_bytes, "--target-bytes")
        return SizeLimit(f"--target-bytes {target_bytes}", size, "weights")
    if memory is None:
        return None
    demand = Demand(parse_size(memory, "--memory") / GIB)
    left = int((demand.memory_gib - demand.reserve_gib) * GIB)
    if left <= 0:
        raise RecipeError(
            f"--memory {memory}: {demand.reserve_gib:g} GiB are kept for the process, activations "
            "and CUDA graphs; give more"
        )
    return SizeLimit(f"--memory {memory}", left, "memory")


def request_cache_bytes(model: Path, recipe: Recipe) -> int:
    """Bytes of the KV cache of one typical request, as ``taut plan`` counts it.

    Args:
        model: directory of the base model; compression leaves its attention's shape.
        recipe: may store the cache in 8 bits.

    Raises:
        WorkerError: the model's attention keeps no keys and values by head.
    """
    demand = Demand(0.0)
    cache = recipe.kv_cache
    kind = "auto" if cache is None else INT8_CACHE if cache.dtype == "int8" else cache.dtype
    tokens = demand.prompt_tokens + demand.completion_tokens
    return tokens * kv_bytes_per_token(model, kind)
