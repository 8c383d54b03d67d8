"""The ``quanto`` stage: weights rounded by optimum-quanto, stored as the numbers it computes.

The library rounds by output channel, from the largest weight of each, in the model's own dtype. Its
codes and scales are written as they are, so that a checkpoint holds the weights which
``quantize`` and ``freeze`` of the library would leave in the model.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch

from taut_deploy.compress.formats.activations import Activations
from taut_deploy.compress.formats.float8 import Float8Format
from taut_deploy.compress.formats.protocol import WeightFormat
from taut_deploy.compress.formats.registry import weights_alone
from taut_deploy.compress.layers_at_once import solve_layers
from taut_deploy.compress.quantize.float8 import Float8Spec, Float8Weight
from taut_deploy.compress.quantize.grid import QuantizedWeight
from taut_deploy.compress.quantize.joined import format_of
from taut_deploy.compress.quantize.protocol import Codes
from taut_deploy.compress.state import BlockState, LayerState
from taut_deploy.compress.threads import single_thread
from taut_deploy.errors import ModelError
from taut_deploy.recipe.stages import Quanto


def quanto_format(stage: Quanto, input_sizes: Collection[int], dtype: torch.dtype) -> WeightFormat:
    """What the library's weights are stored in: one scale a channel, inputs as they are.

    Args:
        stage: of the recipe.
        input_sizes: K of the layers, all of which it takes.
        dtype: of the model's weights, which the scales have too.
    """
    del input_sizes
    if stage.weights == "int8":
        return weights_alone(8, None, dtype)
    return Float8Format("FP8A16", Float8Spec(dtype), Activations())


def quanto(state: BlockState, index: int, stage: Quanto) -> None:
    """Round every layer of the stage.

    Raises:
        ModelError: a weight is not finite, or has a row of zeros; names the layer.
    """
    layers = state.of_stage(index)
    found = solve_layers(partial(_all_rounded, stage=stage), layers, state.devices)
    for layer, codes in zip(layers, found, strict=True):
        layer.store(format_of(layer).store(codes, layer.group.absmax), stage.method)


def _all_rounded(layers: Sequence[LayerState], *, stage: Quanto) -> list[Codes]:
    with single_thread():
        return [_rounded(layer, stage, format_of(layer)) for layer in layers]


def _rounded(layer: LayerState, stage: Quanto, kept: WeightFormat) -> Codes:
    from optimum.quanto import AbsmaxOptimizer, qfloat8_e4m3fn, qint8, quantize_weight

    spec: Any = kept.spec
    weight = layer.sound_weight().to(spec.scale_dtype)
    if not bool(weight.any(dim=1).all()):
        raise ModelError(
            f"{layer.name}: has a row of zeros, of which optimum-quanto makes no number; put it "
            "into 'ignore' or use 'quantize'"
        )
    kind: Any = qint8 if stage.weights == "int8" else qfloat8_e4m3fn
    scale = AbsmaxOptimizer()(weight, kind, 0)
    found: Any = quantize_weight(weight, kind, 0, scale, optimized=False)
    scales = found._scale.reshape(-1, 1)
    if stage.weights == "int8":
        return QuantizedWeight(found._data, scales, None)
    return Float8Weight(found._data, scales)
