"""The ``smooth`` stage: factors are chosen for every input and folded into what produces it."""

from collections.abc import Sequence
from functools import partial

import torch

from taut_deploy.compress.equalize.apply import apply_scales, choose_together
from taut_deploy.compress.equalize.fold import Tie, find_fold
from taut_deploy.compress.equalize.smoothquant import QuantizedProduct, choose_scales
from taut_deploy.compress.formats.protocol import WeightFormat
from taut_deploy.compress.quantize import rtn
from taut_deploy.compress.quantize.protocol import Codes
from taut_deploy.compress.state import BlockState, LayerState
from taut_deploy.recipe.stages import Smooth


def smooth(state: BlockState, index: int, stage: Smooth) -> None:
    """Smooth every input that a layer of the stage reads and whose producer can take factors."""
    found = ((group, find_fold(state.module, group)) for group in state.groups_of_stage(index))
    choose = partial(_chosen, alpha=None if stage.alpha == "auto" else stage.alpha)
    folds = [(group, fold) for group, fold in found if fold is not None]
    for group, fold, layers, scales in choose_together(state, folds, choose):
        apply_scales(group, layers, fold, scales)
        for layer in layers:
            layer.methods.append(stage.method)


def _chosen(layers: Sequence[LayerState], tie: Tie, *, alpha: float | None) -> torch.Tensor:
    """The factors of the input that layers read."""
    group = layers[0].group
    weights = [layer.module.weight.data.float() for layer in layers]
    return choose_scales(group.sample, group.absmax, weights, _product(layers), alpha, tie)


def _product(layers: Sequence[LayerState]) -> QuantizedProduct:
    """How a group's layers will multiply; exact where none of them is rounded to a grid."""
    layer_format = next(
        (layer.format for layer in layers if isinstance(layer.format, WeightFormat)), None
    )

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if layer_format is None:
            return x @ weight.T
        codes: Codes = rtn.quantize_weight(weight, layer_format.spec)
        # A scale fixed beforehand would be taken from these very inputs.
        scale = layer_format.activations.scale(x.abs().amax(0))
        return layer_format.activations.round(x, scale) @ codes.dequantize().T

    return product
