"""The ``prune`` stage: a mask for every layer, and what the weights that stay become."""

from collections.abc import Sequence
from functools import partial

import torch

from taut_deploy.compress.layers_at_once import solve_layers
from taut_deploy.compress.prune import magnitude, sparsegpt, wanda
from taut_deploy.compress.prune.patterns import Pattern, parse_pattern, why_not_fit
from taut_deploy.compress.prune.refit import refit
from taut_deploy.compress.quantize.gptq import Feedback, feedback_of
from taut_deploy.compress.reconstruct import Kept, reconstruct
from taut_deploy.compress.state import BlockState, LayerState
from taut_deploy.compress.threads import single_thread
from taut_deploy.recipe.stages import Prune


def why_not_pruned(stage: Prune, n: int, k: int) -> str | None:
    """Why a layer [N, K] cannot have the stage's pattern; None if it can."""
    del n
    return why_not_fit(_pattern(stage, ""), k)


def prune(state: BlockState, index: int, stage: Prune) -> None:
    """Prune every layer of the stage; later stages keep the zeros.

    Raises:
        ModelError: a weight or an input is not finite; names the layer.
    """
    layers = state.named_of_stage(index)
    found = solve_layers(partial(_pruned, stage=stage), layers.values(), state.devices)
    kept: dict[str, Kept] = {}
    for (name, layer), (pruned, mask) in zip(layers.items(), found, strict=True):
        layer.mask = mask
        layer.methods += [stage.algorithm, *(["refit"] if stage.refit else [])]
        kept[name] = Kept(pruned, mask)
    if stage.steps is not None:
        reconstruct(state, kept, stage.steps)
    for name, weights in kept.items():
        layer = state.layers[name]
        layer.methods += [] if stage.steps is None else ["reconstruct"]
        layer.module.weight.data = weights().detach()  # fp32 until it is stored


def _pruned(
    layers: Sequence[LayerState], *, stage: Prune
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The new weight and the mask, both [N, K], of layers that read one input."""
    feedback = None
    if stage.algorithm == "sparsegpt":
        with single_thread():
            feedback = feedback_of(
                layers[0].hessian(), dampening_frac=stage.dampening_frac, act_order=False
            )
    found = []
    for layer in layers:
        weight = layer.sound_weight()
        with single_thread():
            pruned, mask = _prune_weight(layer, weight, stage, feedback)
        if stage.refit:
            pruned = refit(
                weight, pruned, mask, layer.hessian(), dampening_frac=stage.dampening_frac
            )
        found.append((pruned, mask))
    return found


def _prune_weight(
    layer: LayerState, weight: torch.Tensor, stage: Prune, feedback: Feedback | None
) -> tuple[torch.Tensor, torch.Tensor]:
    pattern = _pattern(stage, layer.name)
    if feedback is not None:
        return sparsegpt.prune_weight(weight, feedback, pattern)
    mask = (
        magnitude.mask(weight, pattern)
        if stage.algorithm == "magnitude"
        else wanda.mask(weight, layer.hessian().diagonal(), pattern)
    )
    return weight * mask, mask


def _pattern(stage: Prune, name: str) -> Pattern:
    """Of a layer of this full name."""
    return parse_pattern(stage.pattern or stage.sparsity_of(name) or "")
