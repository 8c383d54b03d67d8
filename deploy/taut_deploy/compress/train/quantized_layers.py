"""The quantised layers of a compressed-tensors checkpoint: read for training, written again.

Schemes by layer, unpacking and packing are the library's; only what a straight-through gradient
needs (grid, scale, zero point) is taken apart here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.utils import match_named_modules
from torch import nn

from taut_deploy.compress.quantize.scales import expand
from taut_deploy.compress.source.weights import WeightReader
from taut_deploy.compress.train.fake_quantize import Grid, codes_of
from taut_deploy.errors import ModelError

_PARTS = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape")


@dataclass(frozen=True)
class QuantizedLayer:
    """One quantised layer as it is stored, and what a gradient needs of it.

    Args:
        name: of the module.
        scheme: the library's description.
        weight: [N, K] fp32, dequantised.
        scale: fp32, a shape of :mod:`.fake_quantize`.
        zero: int8 of the scale's shape, or None.
        grid: codes of a weight.
    """

    name: str
    scheme: QuantizationScheme
    weight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    grid: Grid


def layer_schemes(model: nn.Module, entry: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and scheme of every layer that a ``quantization_config`` covers.

    Args:
        model: with plain layers, of any device.
        entry: ``quantization_config`` of config.json.

    Raises:
        ModelError: it is none that the library reads.
    """
    try:
        config = QuantizationConfig.model_validate(
            {key: value for key, value in entry.items() if key != "quant_method"}
        )
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ModelError(f"config.json: quantization_config: {reason}") from error
    for scheme in config.config_groups.values():
        for name, module in match_named_modules(model, scheme.targets, config.ignore):
            if isinstance(module, nn.Embedding):
                raise ModelError(
                    f"{name}: embeddings of {scheme.weights.num_bits} bits cannot be trained; "
                    "distil a checkpoint whose embeddings are dense"
                )
            if scheme.weights is not None:
                yield (
                    name,
                    scheme.model_copy(
                        update={"format": scheme.format or _format(module, scheme, config)}
                    ),
                )


def _format(module: nn.Module, scheme: QuantizationScheme, config: QuantizationConfig) -> str:
    plain = {"dense", "mixed-precision", None}
    return str(
        infer_module_format(type(module), scheme) if config.format in plain else config.format
    )


def read_layer(name: str, scheme: QuantizationScheme, reader: WeightReader) -> QuantizedLayer:
    """Read one layer.

    Args:
        name: of the module.
        scheme: from :func:`layer_schemes`.
        reader: of the checkpoint's tensors.

    Raises:
        ModelError: a tensor is missing, or the scheme is none that can be trained.
    """
    grid = _grid(name, scheme.weights)
    stored = {
        part: reader.read(f"{name}.{part}") for part in _PARTS if f"{name}.{part}" in reader.stored
    }
    if "weight_scale" not in stored or not stored.keys() & {"weight", "weight_packed"}:
        raise ModelError(f"{name}: config.json says it is quantised, but its tensors are not there")
    unpacked = _compressor(scheme).decompress(
        {**stored, "weight_scale": stored["weight_scale"].float()}, scheme
    )
    zero = unpacked.get("weight_zero_point")
    return QuantizedLayer(
        name,
        scheme,
        unpacked["weight"].float(),
        stored["weight_scale"].float(),
        None if zero is None or scheme.weights.symmetric else zero.to(torch.int8),
        grid,
    )


def require_trained(scheme: QuantizationScheme, name: str) -> None:
    """Refuse a scheme whose checkpoints cannot be trained.

    Args:
        scheme: of layers to come.
        name: of a stage or a module, for the error.

    Raises:
        ModelError: in words.
    """
    _grid(name, scheme.weights)
    require_trained_inputs(scheme, name)


def require_trained_inputs(scheme: QuantizationScheme, name: str) -> None:
    """Refuse a rounding of inputs that is not trained; see :func:`require_trained`.

    Raises:
        ModelError: in words.
    """
    inputs = scheme.input_activations
    if inputs is None:
        return
    kind, strategy = (str(getattr(x, "value", x)) for x in (inputs.type, inputs.strategy))
    known = inputs.num_bits == 8 and inputs.symmetric and kind in ("int", "float")
    if not known or strategy != ("token" if bool(inputs.dynamic) else "tensor"):
        raise ModelError(
            f"{name}: activations of {inputs.num_bits} bits by {strategy} cannot be trained; "
            "8 bits by token, or by tensor with a fixed scale, can"
        )


def stored_tensors(
    layer: QuantizedLayer, weight: torch.Tensor, scale: torch.Tensor, stored: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors of a trained layer by their names in the checkpoint.

    Args:
        layer: as it was read.
        weight: [N, K] fp32 master weight, on the CPU.
        scale: fp32, representable in ``stored``.
        stored: dtype of the scales on disk.

    Raises:
        ModelError: what was packed does not read back as the codes that were trained.
    """
    zero = None if layer.zero is None else layer.zero.cpu()
    codes = codes_of(weight, scale, zero, layer.grid)
    shift = 0.0 if zero is None else expand(zero.float(), weight.shape)
    exact = (codes - shift) * expand(scale, weight.shape)
    parts: dict[str, torch.Tensor] = {"weight": exact, "weight_scale": scale}
    if zero is not None:
        parts["weight_zero_point"] = zero
    compressor = _compressor(layer.scheme)
    packed = compressor.compress(parts, layer.scheme)
    if not torch.equal(compressor.decompress(packed, layer.scheme)["weight"].float(), exact):
        raise ModelError(f"{layer.name}: what was packed does not read back; nothing was written")
    packed["weight_scale"] = scale.to(stored)
    return {f"{layer.name}.{part}": tensor for part, tensor in packed.items()}


def _compressor(scheme: QuantizationScheme) -> Any:
    return BaseCompressor.get_value_from_registry(getattr(scheme.format, "value", scheme.format))


def _grid(name: str, weights: QuantizationArgs) -> Grid:
    kind = getattr(weights.type, "value", weights.type)
    if getattr(weights, "actorder", None) in ("group", "dynamic"):
        raise ModelError(f"{name}: columns in an order of their own (g_idx) cannot be trained")
    if kind == "int" and weights.num_bits <= 8:
        return Grid.of_integers(weights.num_bits)
    if kind == "float" and weights.num_bits == 8 and weights.group_size is None:
        return Grid.of_float8()
    raise ModelError(
        f"{name}: weights of {weights.num_bits} bits, type {kind}, cannot be trained yet; "
        "distil a checkpoint of integers or float8"
    )
