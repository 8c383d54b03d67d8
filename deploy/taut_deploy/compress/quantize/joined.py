"""Formats of quantised layers, and grids that layers share which vLLM joins into one."""

from collections.abc import Collection
from typing import Any

from taut_deploy.compress.formats.protocol import WeightFormat
from taut_deploy.compress.quantize.float4 import Float4Spec
from taut_deploy.compress.quantize.float8 import Float8TensorSpec
from taut_deploy.compress.quantize.protocol import Spec
from taut_deploy.compress.state import LayerState
from taut_deploy.fused_layers import fused_groups


def format_of(layer: LayerState) -> WeightFormat:
    """The format that a quantised layer will be stored in."""
    if not isinstance(layer.format, WeightFormat):
        raise TypeError(f"{layer.name}: a quantised layer has a format")
    return layer.format


def joined_specs(layers: Collection[LayerState]) -> dict[str, Spec[Any]]:
    """The shape of each layer's grid, by full name.

    vLLM takes one scale of a tensor for queries, keys and values, the largest of theirs, and one
    for gate and up: with different ones it would compute something else, and at most log it.

    Args:
        layers: of one stage, all with a format.

    Raises:
        ModelError: a weight is not finite; names the layer.
    """
    by_name = {layer.name: layer for layer in layers}
    specs: dict[str, Spec[Any]] = {name: format_of(one).spec for name, one in by_name.items()}
    for names in fused_groups(by_name):
        spec = specs[names[0]]
        if isinstance(spec, Float4Spec | Float8TensorSpec):
            joined = spec.joined([by_name[name].sound_weight() for name in names])
            specs |= dict.fromkeys(names, joined)
    return specs
