"""From codes to compressed-tensors 0.17: tensor names, packing and ``quantization_config``.

Stock vLLM and transformers read the result. ``int-quantized`` stores int8 weights as they are;
``pack-quantized`` packs eight 4-bit codes into an int32 along K, and zero points along N.
"""

from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    QuantizationStrategy,
)

from taut_deploy.compress.quantize.grid import GridSpec, QuantizedWeight
from taut_deploy.recipe import Quantize


def stored_tensors(weight: QuantizedWeight, scheme: str) -> dict[str, torch.Tensor]:
    """One layer's tensors by their name inside the layer.

    Args:
        weight: codes with grid.
        scheme: ``W8A8`` or ``W4A16``.
    """
    if scheme == "W8A8":
        return {"weight": weight.codes, "weight_scale": weight.scale}
    tensors = {
        "weight_packed": pack_to_int32(weight.codes, num_bits=4),
        "weight_scale": weight.scale,
        "weight_shape": torch.tensor(weight.codes.shape, dtype=torch.int64),
    }
    if weight.zero is not None:
        tensors["weight_zero_point"] = pack_to_int32(weight.zero, num_bits=4, packed_dim=0)
    return tensors


def read_back(tensors: dict[str, torch.Tensor], scheme: str) -> QuantizedWeight:
    """Inverse of :func:`stored_tensors`, through the library's own unpacking."""
    if scheme == "W8A8":
        return QuantizedWeight(tensors["weight"], tensors["weight_scale"], None)
    shape = torch.Size(tensors["weight_shape"].tolist())
    codes = unpack_from_int32(tensors["weight_packed"], 4, shape)
    zero = tensors.get("weight_zero_point")
    if zero is not None:
        zero = unpack_from_int32(zero, 4, torch.Size(tensors["weight_scale"].shape), packed_dim=0)
    return QuantizedWeight(codes, tensors["weight_scale"], zero)


def quantization_config(quantize: Quantize, spec: GridSpec, ignore: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` entry of config.json.

    Args:
        quantize: the recipe's stage.
        spec: grid as used (group size chosen).
        ignore: full names of linear layers left alone.
    """
    per_group = spec.group_size is not None
    weights = QuantizationArgs(
        num_bits=spec.num_bits,
        type="int",
        symmetric=spec.symmetric,
        strategy=QuantizationStrategy.GROUP if per_group else QuantizationStrategy.CHANNEL,
        group_size=spec.group_size,
        dynamic=False,
    )
    activations = None
    if quantize.scheme == "W8A8":
        activations = QuantizationArgs(
            num_bits=8,
            type="int",
            symmetric=True,
            strategy=QuantizationStrategy.TOKEN,
            dynamic=True,
        )
    scheme_format = "int-quantized" if quantize.scheme == "W8A8" else "pack-quantized"
    scheme = QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=activations, format=scheme_format
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=scheme_format,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=ignore,
    )
    dumped: dict[str, Any] = config.model_dump(mode="json", exclude_none=True)
    return {**dumped, "quant_method": "compressed-tensors"}
