"""The ``awq`` stage: factors of least output error are folded into what produces an input."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

import torch

from taut_deploy.compress.calibrate.observe import InputGroup
from taut_deploy.compress.equalize.apply import apply_scales
from taut_deploy.compress.equalize.awq import Rounding, choose_scales
from taut_deploy.compress.equalize.fold import Fold, Tie, find_fold
from taut_deploy.compress.formats.protocol import WeightFormat
from taut_deploy.compress.layers_at_once import solve_layers
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
    folds = {group.layers[0]: (group, fold) for group, fold in _folds(state, index, stage)}
    members = {name: [state.layers[one] for one in folds[name][0].layers] for name in folds}
    ties = {state.layers[name].name: fold.tie for name, (_, fold) in folds.items()}
    # Chosen before any is applied: what takes an input's factors was there before its readers.
    chosen = solve_layers(
        partial(_chosen, ties=ties), chain.from_iterable(members.values()), state.devices
    )
    by_layer = dict(
        zip((one.name for each in members.values() for one in each), chosen, strict=True)
    )
    for name, (group, fold) in folds.items():
        scales = by_layer[state.layers[name].name]
        if scales is None or bool((scales == 1).all()):
            continue
        apply_scales(group, members[name], fold, scales)
        for layer in members[name]:
            layer.methods.append(stage.method)


def _chosen(layers: Sequence[LayerState], *, ties: Mapping[str, Tie]) -> list[torch.Tensor | None]:
    """The factors of the input that layers read, for each the same; None where none is rounded."""
    rounding = _rounding(layers)
    if rounding is None:
        return [None] * len(layers)
    weights = [layer.sound_weight() for layer in layers]
    with single_thread():
        scales = choose_scales(layers[0].hessian(), weights, rounding, ties[layers[0].name])
    return [scales] * len(layers)


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
