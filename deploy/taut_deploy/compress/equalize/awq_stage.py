"""The ``awq`` stage: factors of least output error are folded into what produces an input."""

from collections.abc import Sequence

import torch

from taut_deploy.compress.calibrate.observe import InputGroup
from taut_deploy.compress.equalize.apply import apply_scales, choose_together
from taut_deploy.compress.equalize.awq import Rounding, choose_scales
from taut_deploy.compress.equalize.fold import Fold, Tie, find_fold
from taut_deploy.compress.formats.protocol import WeightFormat
from taut_deploy.compress.quantize import rtn
from taut_deploy.compress.state import BlockState, LayerState
from taut_deploy.compress.threads import single_thread
from taut_deploy.errors import RecipeError
from taut_deploy.recipe.stages import Awq


def awq(state: BlockState, index: int, stage: Awq) -> None:
    """Scale every input that a layer of the stage reads and whose producer can take factors.

    Raises:
        RecipeError: no input of the block can be scaled.
        ModelError: a weight or an input is not finite; names the layer.
    """
    for group, fold, layers, scales in choose_together(state, _folds(state, index, stage), _chosen):
        apply_scales(group, layers, fold, scales)
        for layer in layers:
            layer.methods.append(stage.method)


def _chosen(layers: Sequence[LayerState], tie: Tie) -> torch.Tensor | None:
    """The factors of the input that layers read; None where none of them will be rounded."""
    rounding = _rounding(layers)
    if rounding is None:
        return None
    weights = [layer.sound_weight() for layer in layers]
    with single_thread():
        return choose_scales(layers[0].hessian(), weights, rounding, tie)


def _folds(state: BlockState, index: int, stage: Awq) -> list[tuple[InputGroup, Fold]]:
    """The inputs that can be scaled, each with the place that takes its factors."""
    found = [
        (group, fold)
        for group in state.groups_of_stage(index)
        if (fold := find_fold(state.module, group)) is not None
    ]
    if not found:
        raise RecipeError(
            f"stages.{stage.method}: no input in {state.name} comes from a norm or a linear layer "
            "that can take factors; leave this stage out"
        )
    return found


def _rounding(layers: Sequence[LayerState]) -> Rounding | None:
    """How a group's layers will be rounded; None where none of them will."""
    formats = (layer.format for layer in layers)
    layer_format = next((one for one in formats if isinstance(one, WeightFormat)), None)
    if layer_format is None:
        return None
    return lambda weight: rtn.quantize_weight(weight, layer_format.spec).dequantize()
