"""The ``quantize`` stage: layers are rounded onto the grid of their format and stored so."""

from typing import Any

from taut_deploy.compress.quantize import gptq, rtn
from taut_deploy.compress.quantize.joined import joined_specs
from taut_deploy.compress.quantize.protocol import Codes, Spec
from taut_deploy.compress.state import BlockState, LayerState
from taut_deploy.compress.threads import single_thread
from taut_deploy.recipe.stages import Quantize


def quantize(state: BlockState, index: int, stage: Quantize) -> None:
    """Round every layer of the stage.

    Raises:
        ModelError: a weight or an input is not finite; names the layer.
    """
    specs = joined_specs(state.of_stage(index))
    for layer in state.of_stage(index):
        if layer.format is None:
            raise TypeError(f"{layer.name}: a quantised layer has a format")
        with single_thread():
            codes = _rounded(layer, stage, specs[layer.name])
        stored = layer.format.store(codes, layer.group.absmax)
        layer.store(stored, stage.algorithm)


def _rounded(layer: LayerState, stage: Quantize, spec: Spec[Any]) -> Codes:
    weight = layer.sound_weight()
    if stage.algorithm == "rtn" or layer.group.hessian is None:
        codes: Codes = rtn.quantize_weight(weight, spec)
        return codes
    rounded: Codes = gptq.quantize_weight(
        weight,
        layer.group.hessian,
        spec,
        dampening_frac=stage.dampening_frac,
        act_order=stage.act_order,
        mask=layer.mask,
    )
    return rounded
