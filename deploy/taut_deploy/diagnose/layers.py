"""The linear layers of a model directory as vLLM builds them, each with its kernel."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taut_deploy.checkpoint import is_checkpoint, read_manifest, verify
from taut_deploy.diagnose import default_kernels, kernel_choice
from taut_deploy.diagnose.layer_schemes import DENSE, LayerScheme, Quantization, read_quantization
from taut_deploy.diagnose.layer_shapes import (
    StoredLayer,
    has_weights,
    layers_by_sizes,
    stored_layers,
)
from taut_deploy.errors import ModelError
from taut_deploy.models.directory import read_config

if TYPE_CHECKING:
    from taut_deploy.checkpoint import Manifest

_Layers = dict[str, tuple[int, int, LayerScheme]]
"""Name → N, K and how it is quantised."""

# What vLLM makes one layer of, its output features one after another.
_MERGED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
_MERGED |= dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")


def explain(directory: Path) -> dict[str, Any]:
    """Return what a model directory holds, and which kernels its layers run on.

    Args:
        directory: a taut checkpoint, or a Hugging Face directory that others made.

    Returns:
        ``checkpoint``: name, scheme and what was verified. ``layers``: a row a shape and kernel.

    Raises:
        ModelError: no such directory, no readable ``config.json``, or a damaged shard.
        CheckpointError: the files do not match the manifest.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such directory")
    if not is_checkpoint(directory):
        return _explain_plain(directory)
    manifest = verify(directory, "full")
    return {
        "checkpoint": {
            "name": manifest.name,
            "scheme": manifest.scheme,
            "base_model": manifest.base_model.get("name"),
            "digest": manifest.digest,
            "files": f"{len(manifest.files)} verified",
        },
        "layers": _rows(kernels_of_checkpoint(directory, manifest)),
    }


def _rows(choices: Counter[tuple[int, int, str, str]]) -> list[dict[str, Any]]:
    return [
        {"shape": f"{n}x{k}", "layers": count, "kernel": kernel, "reason": reason}
        for (n, k, kernel, reason), count in choices.items()
    ]


def _explain_plain(directory: Path) -> dict[str, Any]:
    """Explain a directory without ``taut.json``, quantised by others or dense."""
    config = read_config(directory)
    quantization = read_quantization(config)
    choices = Counter[tuple[int, int, str, str]]()
    reason = quantization.why_not_judged()
    if reason is None:
        source, stored = _find_layers(directory, config, quantization)
        choices = _count_choices(_plain_layers(quantization, stored), config)
    else:
        source = f"{kernel_choice.UNKNOWN_KERNEL}: {reason}"
    return {
        "checkpoint": {
            "name": directory.resolve().name,
            "scheme": quantization.summary(),
            "files": "not verified: no taut.json",
            "layers": source,
        },
        "layers": _rows(choices),
    }


def _find_layers(
    directory: Path, config: dict[str, Any], quantization: Quantization
) -> tuple[str, dict[str, StoredLayer]]:
    """Where a directory's linear layers are read from, and the layers."""
    if has_weights(directory):
        found = stored_layers(directory, quantization.method, quantization.bits)
        return "read from the safetensors' headers", found
    if (sized := layers_by_sizes(config)) is not None:
        return "by config.json's sizes: no safetensors here", sized
    unknown, family = kernel_choice.UNKNOWN_KERNEL, config.get("model_type")
    return f"{unknown}: no safetensors here, and the sizes of {family!r} do not tell", {}


def _plain_layers(quantization: Quantization, stored: dict[str, StoredLayer]) -> _Layers:
    """Linear layers of others' making, as they are stored."""
    layers: _Layers = {}
    for name, layer in stored.items():
        quantised = layer.quantised
        if quantised is None:
            quantised = quantization.quantises(name)
        layers[name] = (layer.n, layer.k, quantization.scheme_of(name) if quantised else DENSE)
    return layers


def kernels_of_checkpoint(
    checkpoint: Path, manifest: "Manifest"
) -> Counter[tuple[int, int, str, str]]:
    """Count the layers of a taut checkpoint by N, K, kernel and what is against ours.

    Args:
        checkpoint: its directory.
        manifest: its manifest, verified.
    """
    config = default_kernels.config_of(checkpoint)
    return _count_choices(manifest_layers(checkpoint, manifest, config), config)


def layers_as_built(directory: Path) -> _Layers:
    """Return a model's linear layers as vLLM builds them on one device.

    Args:
        directory: a taut checkpoint, or a Hugging Face directory that others made.

    Returns:
        Name → N, K and how it is quantised; none where the method is not known.

    Raises:
        ModelError: no such directory, no readable ``config.json``, or a damaged shard.
        CheckpointError: its manifest cannot be read.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such directory")
    config = read_config(directory)
    if is_checkpoint(directory):
        return fuse(manifest_layers(directory, read_manifest(directory), config))
    quantization = read_quantization(config)
    if quantization.why_not_judged() is not None:
        return {}
    _, stored = _find_layers(directory, config, quantization)
    return fuse(_plain_layers(quantization, stored))


def _count_choices(
    layers: _Layers, config: Mapping[str, Any]
) -> Counter[tuple[int, int, str, str]]:
    """How many layers of each shape [N, K] run on which kernel, and what is against ours.

    Asked of the layers as vLLM builds them on one device; tensor parallelism cuts other shapes.
    """
    suited = default_kernels.suits_fused_ops(config, ())
    half = config.get("dtype", config.get("torch_dtype")) == "float16"
    engine = kernel_choice.engine_here(half=half, suited=suited)
    choices = Counter[tuple[int, int, str, str]]()
    for name, (n, k, scheme) in fuse(layers).items():
        choices[n, k, *kernel_choice.choose_kernel(name, scheme, (n, k), engine)] += 1
    return choices


def manifest_layers(checkpoint: Path, manifest: "Manifest", config: Mapping[str, Any]) -> _Layers:
    """Return the compressed layers of a taut checkpoint, as they are stored.

    Args:
        checkpoint: its directory.
        manifest: its manifest.
        config: its ``config.json``.
    """
    told = read_quantization(config)
    widths = {_packed_bits(layer) for layer in manifest.layers}
    shapes = {
        bits: _layer_shapes(checkpoint) if bits == 4 else _layer_shapes(checkpoint, bits)
        for bits in widths
    }
    layers: _Layers = {}
    for layer in manifest.layers:
        name, group = str(layer["name"]), layer["group_size"] or -1
        configured = told.scheme_of(name)
        scheme = str(layer.get("scheme", manifest.scheme))
        if scheme.startswith("FP8-"):  # which kernels are known for by the words of config.json
            scheme = configured.name
        shape = shapes[_packed_bits(layer)][name]
        scheme_of_layer = LayerScheme(
            scheme, group, zero_points=configured.zero_points, unserved=configured.unserved
        )
        layers[name] = (*shape, scheme_of_layer)
    return layers


def fused_name(layer: str) -> str:
    """Return the name of the layer that vLLM makes this one a part of; its own where of none.

    Args:
        layer: full name.
    """
    parent, _, leaf = layer.rpartition(".")
    return f"{parent}.{_MERGED.get(leaf, leaf)}"


def fuse(layers: _Layers) -> _Layers:
    """Put layers together as vLLM does, with the scheme of the last part.

    Args:
        layers: N, K and scheme of each, by full name.
    """
    fused: _Layers = {}
    for name, (n, k, scheme) in layers.items():
        merged = fused_name(name)
        before = fused[merged][0] if merged in fused else 0
        fused[merged] = (before + n, k, scheme)
    return fused


def _packed_bits(layer: Mapping[str, Any]) -> int:
    """Bits of a layer's packed weights; of older manifests and unpacked ones it does not matter."""
    bits = layer.get("bits", 4)
    return bits if type(bits) is int and 1 <= bits <= 8 else 4


def _layer_shapes(checkpoint: Path, bits: int = 4) -> dict[str, tuple[int, int]]:
    """Shape [N, K] of every linear layer of a taut checkpoint, read from the shards' headers."""
    found = stored_layers(checkpoint, "compressed-tensors", bits)
    return {name: (layer.n, layer.k) for name, layer in found.items()}
