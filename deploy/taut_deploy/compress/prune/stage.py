"""The ``prune`` stage: a mask for every layer, and what the weights that stay become."""

import torch

from taut_deploy.compress.prune import magnitude, sparsegpt, wanda
from taut_deploy.compress.prune.patterns import Pattern, parse_pattern, why_not_fit
from taut_deploy.compress.prune.refit import refit
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
    kept: dict[str, Kept] = {}
    for name, layer in state.named_of_stage(index).items():
        weight = layer.sound_weight()
        with single_thread():
            pruned, layer.mask = _prune_weight(layer, weight, stage)
        layer.methods.append(stage.algorithm)
        if stage.refit:
            pruned = refit(
                weight, pruned, layer.mask, layer.hessian(), dampening_frac=stage.dampening_frac
            )
            layer.methods.append("refit")
        kept[name] = Kept(pruned, layer.mask)
    if stage.steps is not None:
        reconstruct(state, kept, stage.steps)
    for name, weights in kept.items():
        layer = state.layers[name]
        layer.methods += [] if stage.steps is None else ["reconstruct"]
        layer.module.weight.data = weights().detach()  # fp32 until it is stored


def _prune_weight(
    layer: LayerState, weight: torch.Tensor, stage: Prune
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new weight and its mask, both [N, K]."""
    pattern = _pattern(stage, layer.name)
    if stage.algorithm == "sparsegpt":
        return sparsegpt.prune_weight(
            weight, layer.hessian(), pattern, dampening_frac=stage.dampening_frac
        )
    mask = (
        magnitude.mask(weight, pattern)
        if stage.algorithm == "magnitude"
        else wanda.mask(weight, layer.hessian().diagonal(), pattern)
    )
    return weight * mask, mask


def _pattern(stage: Prune, name: str) -> Pattern:
    """Of a layer of this full name."""
    return parse_pattern(stage.pattern or stage.sparsity_of(name) or "")
