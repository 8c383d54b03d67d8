"""The ``smooth`` stage: factors are chosen for every input and folded into what produces it."""

import torch

from taut_deploy.compress.calibrate.observe import InputGroup
from taut_deploy.compress.equalize.apply import apply_scales
from taut_deploy.compress.equalize.fold import find_fold
from taut_deploy.compress.equalize.smoothquant import QuantizedProduct, choose_scales
from taut_deploy.compress.formats.protocol import WeightFormat
from taut_deploy.compress.quantize import rtn
from taut_deploy.compress.quantize.protocol import Codes
from taut_deploy.compress.state import BlockState, LayerState
from taut_deploy.recipe.stages import Smooth


def smooth(state: BlockState, index: int, stage: Smooth) -> None:
    """Smooth every input that a layer of the stage reads and whose producer can take factors."""
    for group in state.groups_of_stage(index):
        if _smooth_group(state, group, stage):
            for name in group.layers:
                state.layers[name].methods.append(stage.method)


def _smooth_group(state: BlockState, group: InputGroup, stage: Smooth) -> bool:
    """Choose and fold factors; the group's statistics follow. Says if they did."""
    fold = find_fold(state.module, group)
    if fold is None:
        return False
    layers = [state.layers[name] for name in group.layers]
    weights = [layer.module.weight.data.float() for layer in layers]
    alpha = None if stage.alpha == "auto" else stage.alpha
    scales = choose_scales(group.sample, group.absmax, weights, _product(layers), alpha, fold.tie)
    if bool((scales == 1).all()):
        return False
    apply_scales(group, layers, fold, scales)
    return True


def _product(layers: list[LayerState]) -> QuantizedProduct:
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
