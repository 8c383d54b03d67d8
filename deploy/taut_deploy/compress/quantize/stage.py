"""The ``quantize`` stage: layers are rounded onto the grid of their format and stored so."""

from collections.abc import Collection
from typing import Any

import torch

from taut_deploy.compress.formats.protocol import WeightFormat
from taut_deploy.compress.formats.registry import weight_format
from taut_deploy.compress.quantize import gptq, hqq, rtn
from taut_deploy.compress.quantize.grid import GridSpec
from taut_deploy.compress.quantize.protocol import Codes
from taut_deploy.compress.state import BlockState, LayerState
from taut_deploy.compress.threads import single_thread
from taut_deploy.errors import RecipeError
from taut_deploy.recipe.stages import Quantize

_INTEGERS_ONLY = ("hqq",)


def quantized_format(
    stage: Quantize, input_sizes: Collection[int], dtype: torch.dtype
) -> WeightFormat:
    """The format a stage asks for, if its algorithm can round to it.

    Args:
        stage: of the recipe.
        input_sizes: K of the layers it stores.
        dtype: of the model's weights.

    Raises:
        RecipeError: no allowed group size divides every K, or the algorithm knows integers only.
    """
    found = weight_format(stage, input_sizes, dtype)
    if stage.algorithm in _INTEGERS_ONLY and not isinstance(found.spec, GridSpec):
        raise RecipeError(
            f"stages.quantize.algorithm: {stage.algorithm} rounds to integers, {stage.scheme} are "
            "none; use rtn or gptq"
        )
    return found


def quantize(state: BlockState, index: int, stage: Quantize) -> None:
    """Round every layer of the stage.

    Raises:
        ModelError: a weight or an input is not finite; names the layer.
    """
    for layer in state.of_stage(index):
        if not isinstance(layer.format, WeightFormat):
            raise TypeError(f"{layer.name}: a quantised layer has a format")
        with single_thread():
            codes = _rounded(layer, layer.format, stage)
        stored = layer.format.store(codes, layer.group.absmax)
        layer.store(stored, stage.algorithm)


def _rounded(layer: LayerState, layer_format: WeightFormat, stage: Quantize) -> Codes:
    spec: Any = layer_format.spec
    weight = layer.sound_weight()
    if stage.algorithm == "hqq":
        return hqq.quantize_weight(weight, spec)
    if stage.algorithm == "rtn" or layer.group.hessian is None:
        # AWQ clips ranges by the error of the output; plain rounding knows no data.
        importance = layer.hessian().diagonal() if "awq" in layer.methods else None
        codes: Codes = rtn.quantize_weight(weight, spec, importance)
        return codes
    rounded: Codes = gptq.quantize_weight(
        weight,
        layer.hessian(),
        spec,
        dampening_frac=stage.dampening_frac,
        act_order=stage.act_order,
        mask=layer.mask,
    )
    return rounded
