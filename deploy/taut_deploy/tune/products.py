"""The 4-bit products of a model, as vLLM cuts them for the ranks of a tensor-parallel worker."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taut_deploy.diagnose.default_kernels import config_of
from taut_deploy.diagnose.layer_schemes import LayerScheme
from taut_deploy.diagnose.layers import layers_as_built
from taut_deploy.errors import WorkerError
from taut_deploy.vllm_flags import given_values, is_written_as

_RANKS_FLAGS = ("--tensor-parallel-size", "-tp")
# Cut along their inputs, because what is in front of them was cut along its outputs.
_ROW_PARALLEL = frozenset(
    {"o_proj", "out_proj", "down_proj", "dense", "dense_4h_to_h", "c_proj", "fc2", "w2", "wo"}
)
_FUSED_HEADS = frozenset({"qkv_proj", "Wqkv", "query_key_value"})


@dataclass(frozen=True, slots=True, order=True)
class ShardProduct:
    """A product of one rank.

    Attributes:
        n: output features.
        k: input features.
        weights: format, for example ``g128`` or ``g32-zp``.
        layers: how many the model has.
    """

    n: int
    k: int
    weights: str
    layers: int


def ranks_of(arguments: Sequence[str]) -> int:
    """Return the tensor-parallel size that vLLM's arguments ask for; 1 without.

    Args:
        arguments: passed on to vLLM, which takes the last of two.

    Raises:
        WorkerError: it is no whole number above 0.
    """
    ranks = 1
    for written, text in given_values(arguments, _asks_for_ranks):
        if not text.isdecimal() or int(text) < 1:
            raise WorkerError(f"{written} {text}: give the number of GPUs, 1 or more")
        ranks = int(text)
    return ranks


def _asks_for_ranks(flag: str) -> bool:
    # "--tensor" may also begin other flags of vLLM's.
    return flag == "-tp" or (len(flag) > 10 and is_written_as(flag, _RANKS_FLAGS[0]))


def shard_products(directory: Path, ranks: int) -> list[ShardProduct]:
    """Return a model's W4A16 products that our kernel can run, each once.

    Args:
        directory: a taut checkpoint, or a Hugging Face directory.
        ranks: tensor-parallel size.

    Raises:
        ModelError: no such directory, or it cannot be read.
        WorkerError: the ranks do not divide a layer.
    """
    import torch

    from taut_kernels.for_deploy import of_layer, why_not_ours

    config = config_of(directory)
    counts: Counter[tuple[int, int, str]] = Counter()
    for name, (n, k, scheme) in layers_as_built(directory).items():
        if not _is_ours(name, scheme):
            continue
        wide, deep = _shard(name, n, k, ranks, config)
        group = scheme.group_size
        if why_not_ours(wide, deep, group, dtype=torch.bfloat16, device="cuda") is None:
            weights = of_layer(group, deep, has_zeros=scheme.zero_points)
            counts[wide, deep, weights.value] += 1
    return sorted(ShardProduct(*product, layers) for product, layers in counts.items())


def _is_ours(name: str, scheme: LayerScheme) -> bool:
    whole = scheme.judged and scheme.obstacle is None and ".experts." not in name
    return whole and scheme.name == "W4A16"


def _shard(name: str, n: int, k: int, ranks: int, config: Mapping[str, Any]) -> tuple[int, int]:
    """Return [N, K] of one rank's part of a layer."""
    if ranks == 1:
        return n, k
    leaf = name.rpartition(".")[2]
    if leaf in _ROW_PARALLEL:
        return n, _divided(name, "input", k, ranks)
    if leaf in _FUSED_HEADS and (shard := _heads_of_a_rank(n, ranks, config)) is not None:
        return shard, k
    return _divided(name, "output", n, ranks), k


def _divided(name: str, side: str, features: int, ranks: int) -> int:
    if features % ranks:
        raise WorkerError(
            f"--tensor-parallel-size {ranks}: does not divide the {features} {side} features of "
            f"{name}; use another"
        )
    return features // ranks


def _heads_of_a_rank(n: int, ranks: int, config: Mapping[str, Any]) -> int | None:
    """Return output features of queries, keys and values; key heads repeat where they are few.

    None where the sizes in ``config.json`` do not make up the layer.
    """
    inner = config.get("text_config")
    sizes = inner if isinstance(inner, dict) else config
    heads, kv_heads = sizes.get("num_attention_heads"), sizes.get("num_key_value_heads")
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads < 1 or kv_heads < 1:
        return None
    together = heads + 2 * kv_heads
    if n % together or heads % ranks:
        return None
    return (heads // ranks + 2 * max(1, kv_heads // ranks)) * (n // together)
