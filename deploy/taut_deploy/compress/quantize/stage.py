"""The ``quantize`` stage: layers are rounded onto the grid of their format and stored so."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from taut_deploy.compress.formats.protocol import WeightFormat
from taut_deploy.compress.formats.registry import weight_format
from taut_deploy.compress.free_memory import return_freed_memory
from taut_deploy.compress.layers_at_once import solve_layers
from taut_deploy.compress.quantize import gptq, hqq, rtn
from taut_deploy.compress.quantize.float8 import Float8Spec, Float8TensorSpec
from taut_deploy.compress.quantize.grid import GridSpec
from taut_deploy.compress.quantize.joined import format_of, joined_specs
from taut_deploy.compress.quantize.learned import learn_in_block
from taut_deploy.compress.quantize.protocol import Codes
from taut_deploy.compress.quantize.rounding import Start, start_from
from taut_deploy.compress.state import BlockState, LayerState
from taut_deploy.compress.threads import single_thread
from taut_deploy.errors import RecipeError
from taut_deploy.recipe.stages import Quantize

_ROUNDING_STEPS = 100


def quantized_format(
    stage: Quantize, input_sizes: Collection[int], dtype: torch.dtype
) -> WeightFormat:
    """The format of :func:`.registry.weight_format`, if the stage's algorithm can round to it.

    Raises:
        RecipeError: no allowed group size divides every K, or the algorithm knows integers only.
    """
    found = weight_format(stage, input_sizes, dtype)
    if stage.algorithm == "hqq" and not isinstance(found.spec, GridSpec):
        raise RecipeError(
            f"stages.quantize.algorithm: hqq rounds to integers, {stage.scheme} are none; use rtn "
            "or gptq"
        )
    if stage.algorithm == "round" and not _is_learned(found.spec):
        raise RecipeError(
            f"stages.quantize.algorithm: round learns integers and FP8 by channel, {stage.scheme} "
            "is neither; use gptq"
        )
    return found


def _is_learned(spec: Any) -> bool:
    if isinstance(spec, Float8TensorSpec):  # scales that layers share would have to move together
        return False
    return isinstance(spec, GridSpec) or (isinstance(spec, Float8Spec) and spec.block is None)


def quantize(state: BlockState, index: int, stage: Quantize) -> None:
    """Round every layer of the stage.

    Raises:
        ModelError: a weight or an input is not finite; names the layer.
    """
    if stage.algorithm == "round":
        _learn_rounding(state, index, stage)
        return
    layers = state.of_stage(index)
    solve = partial(_rounded, stage=stage, specs=joined_specs(layers))
    for layer, codes in zip(layers, solve_layers(solve, layers, state.devices), strict=True):
        layer.store(format_of(layer).store(codes, layer.group.absmax), stage.algorithm)


def _learn_rounding(state: BlockState, index: int, stage: Quantize) -> None:
    """Begin at GPTQ's codes, then tune all layers of the stage by the block's output."""
    layers = state.named_of_stage(index)
    solve = partial(_started, stage=stage)
    found = solve_layers(solve, layers.values(), state.devices)
    starts = dict(zip(layers, found, strict=True))
    for layer in layers.values():
        layer.methods.append("gptq")
    with _inputs_rounded(layers.values()):
        learned = learn_in_block(state, starts, stage.steps or _ROUNDING_STEPS)
    for name, layer in layers.items():
        stored = format_of(layer).store(learned[name], layer.group.absmax)
        layer.store(stored, stage.algorithm)


@contextmanager
def _inputs_rounded(layers: Iterable[LayerState]) -> Iterator[None]:
    """Let the layers see inputs as the engine will round them, before they are stored."""
    handles = []
    for layer in layers:
        activations = format_of(layer).activations
        scale = activations.scale(layer.group.absmax)
        handles.append(layer.round_inputs(partial(activations.round, scale=scale)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _rounded(
    layers: Sequence[LayerState], *, stage: Quantize, specs: Mapping[str, Any]
) -> list[Codes]:
    """The codes of layers that read one input."""
    with single_thread():
        if stage.algorithm == "hqq":
            return [hqq.quantize_weight(one.sound_weight(), specs[one.name]) for one in layers]
        if stage.algorithm == "rtn" or layers[0].group.hessian is None:
            return [_nearest(one, specs[one.name]) for one in layers]
        for layer in layers:
            layer.require_sound()
        return_freed_memory()  # of the layers solved before
        feedback = gptq.feedback_of(
            layers[0].hessian(), dampening_frac=stage.dampening_frac, act_order=stage.act_order
        )
        return [_fed_back(layer, feedback, specs[layer.name]) for layer in layers]


def _fed_back(layer: LayerState, feedback: gptq.Feedback, spec: Any) -> Codes:
    # Of one layer at a time: weights in fp32 are twice a block.
    return_freed_memory()
    codes: Codes = gptq.quantize_weight(layer.sound_weight(), feedback, spec, mask=layer.mask)
    return codes


def _nearest(layer: LayerState, spec: Any) -> Codes:
    # AWQ clips ranges by the error of the output; plain rounding knows no data.
    importance = layer.hessian().diagonal() if "awq" in layer.methods else None
    layer.require_sound()
    codes: Codes = rtn.quantize_weight(layer.module.weight.data, spec, importance)
    return codes


def _started(layers: Sequence[LayerState], *, stage: Quantize) -> list[Start]:
    """GPTQ's codes of layers that read one input, as the begin of a search."""
    specs: dict[str, Any] = {layer.name: format_of(layer).spec for layer in layers}
    rounded: list[Any] = _rounded(layers, stage=stage, specs=specs)
    return [
        start_from(layer.sound_weight(), codes, specs[layer.name], layer.mask)
        for layer, codes in zip(layers, rounded, strict=True)
    ]
