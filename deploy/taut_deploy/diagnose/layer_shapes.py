"""Names and shapes of a model's linear layers: from its shards' headers, or from its sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taut_deploy.diagnose.default_kernels import PLAIN_ATTENTION
from taut_deploy.errors import ModelError
from taut_deploy.models.directory import weight_files
from taut_kernels.for_deploy import layer_description

# Two-dimensional weights of modules that look rows up instead of multiplying.
_EMBEDDINGS = frozenset({"wte", "wpe", "shared"})
_JOINED = frozenset({"phi3"})
"""Models whose checkpoints hold q, k and v, gate and up, as one layer."""
_PACKED = frozenset({"qweight", "weight_packed"})
_SHAPE = "weight_shape"
_SCALES = frozenset({"weight_scale", "weight_scale_inv"})
_BITS_OF_WORD = {"I32": 32, "U8": 8}


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """One linear layer as it is stored, before vLLM puts layers together.

    Attributes:
        n: output features.
        k: input features.
        quantised: whether its tensors are a quantised layer's; None where nothing is stored.
    """

    n: int
    k: int
    quantised: bool | None = None


def has_weights(directory: Path) -> bool:
    """Say whether a model directory holds safetensors, whole or not.

    Args:
        directory: the model's.
    """
    return any(directory.glob("*.safetensors")) or any(directory.glob("*.safetensors.index.json"))


def stored_layers(directory: Path, method: str | None, bits: int) -> dict[str, StoredLayer]:
    """Find linear layers in the headers of a model's shards, without reading weights.

    Args:
        directory: the model's.
        method: ``quant_method`` or None.
        bits: of a packed weight.

    Returns:
        Layers by module name; embeddings and weights of other than two dimensions left out.

    Raises:
        ModelError: a shard is missing or damaged.
    """
    tensors: dict[str, tuple[list[int], str]] = {}
    for shard in weight_files(directory):
        tensors |= _header_of(shard)
    scaled = {name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in _SCALES}
    up, down = layer_description.FACTORS
    layers: dict[str, StoredLayer] = {}
    for name, (shape, dtype) in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if len(shape) != 2 or _is_embedding(layer):
            continue
        if leaf == "weight":
            layers[layer] = StoredLayer(shape[0], shape[1], quantised=layer in scaled)
        elif leaf == _SHAPE:
            layers[layer] = StoredLayer(shape[0], shape[1], quantised=True)
        elif leaf == up and f"{layer}.{down}" in tensors:
            k = tensors[f"{layer}.{down}"][0][-1]
            # In the interpolative form only the order has an entry for every output.
            n = tensors.get(f"{layer}.{layer_description.ORDER}", (shape, dtype))[0][0]
            layers.setdefault(layer, StoredLayer(n, k, quantised=True))
        elif leaf in _PACKED and f"{layer}.{_SHAPE}" not in tensors:
            n, k = _unpacked(shape, dtype, method, bits)
            layers[layer] = StoredLayer(n, k, quantised=True)
    return layers


def _unpacked(shape: list[int], dtype: str, method: str | None, bits: int) -> tuple[int, int]:
    """Return [N, K] of packed weights: GPTQ packs [K, N] along K, AWQ along N, others [N, K]."""
    first, last = shape
    word = _BITS_OF_WORD.get(dtype, bits)
    if method == "gptq":
        return last, first * word // bits
    if method == "awq":
        return last * word // bits, first
    return first, last * word // bits


def _header_of(shard: Path) -> dict[str, tuple[list[int], str]]:
    """Return shape and dtype of every tensor in a shard; the values of a ``weight_shape``."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[list[int], str]] = {}
    try:
        with safe_open(shard, framework="pt") as handle:
            for key in handle.keys():  # noqa: SIM118 - not a dict
                part = handle.get_slice(key)
                is_shape = key.endswith(f".{_SHAPE}")
                shape = handle.get_tensor(key).tolist() if is_shape else part.get_shape()
                found[key] = (shape, part.get_dtype())
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{shard}: missing or damaged; fetch the model again") from error
    return found


def _is_embedding(layer: str) -> bool:
    leaf = layer.rpartition(".")[2]
    return "embed" in leaf or leaf in _EMBEDDINGS


def layers_by_sizes(config: Mapping[str, Any]) -> dict[str, StoredLayer] | None:
    """Work out the linear layers of a Llama-like model from its sizes.

    Args:
        config: the model's ``config.json``.

    Returns:
        Layers by module name, None for models of another kind.

    Raises:
        ModelError: a size is missing or no whole number above 0.
    """
    if config.get("model_type") not in PLAIN_ATTENTION - _JOINED:
        return None
    hidden, inner = _size(config, "hidden_size"), _size(config, "intermediate_size")
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    per_head = _size(config, "head_dim", max(1, hidden // heads))
    shapes = {
        "self_attn.q_proj": (heads * per_head, hidden),
        "self_attn.k_proj": (kv_heads * per_head, hidden),
        "self_attn.v_proj": (kv_heads * per_head, hidden),
        "self_attn.o_proj": (hidden, heads * per_head),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layers = {
        f"model.layers.{index}.{name}": StoredLayer(*shape)
        for index in range(_size(config, "num_hidden_layers"))
        for name, shape in shapes.items()
    }
    if not config.get("tie_word_embeddings", False):
        layers["lm_head"] = StoredLayer(_size(config, "vocab_size"), hidden)
    return layers


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        raise ModelError(f"config.json: {name}: expected a whole number above 0, got {value!r}")
    return value
