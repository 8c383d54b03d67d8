"""Grids of layers that vLLM joins into one, where they must share something."""

from collections.abc import Collection
from typing import Any

from taut_deploy.compress.formats.protocol import WeightFormat
from taut_deploy.compress.quantize.float4 import Float4Spec
from taut_deploy.compress.quantize.protocol import Spec
from taut_deploy.compress.state import LayerState
from taut_deploy.fused_layers import fused_groups


def joined_specs(layers: Collection[LayerState]) -> dict[str, Spec[Any]]:
    """The shape of each layer's grid, by full name.

    vLLM takes one global scale for queries, keys and values, the largest of theirs, and one for
    gate and up: with different ones it would compute something else, and only log it.

    Args:
        layers: of one stage, all with a format.

    Raises:
        ModelError: a weight is not finite; names the layer.
    """
    by_name = {layer.name: layer for layer in layers}
    specs: dict[str, Spec[Any]] = {}
    for name, layer in by_name.items():
        if not isinstance(layer.format, WeightFormat):
            raise TypeError(f"{name}: a quantised layer has a format")
        specs[name] = layer.format.spec
    for names in fused_groups(by_name):
        spec = specs[names[0]]
        if isinstance(spec, Float4Spec):
            joined = spec.joined([by_name[name].sound_weight() for name in names])
            specs |= dict.fromkeys(names, joined)
    return specs
