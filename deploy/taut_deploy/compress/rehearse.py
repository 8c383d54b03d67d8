"""What a plan tries on the first block, so that it refuses what the run would."""

from collections.abc import Mapping

import torch

from taut_deploy.compress.block import state_of
from taut_deploy.compress.calibrate.observe import observe_block
from taut_deploy.compress.resolve import Treatment
from taut_deploy.compress.source.stream import StreamedModel
from taut_deploy.compress.stages import BLOCK_STAGES
from taut_deploy.recipe import Recipe

_TOKENS = 8


def rehearse_stages(
    stream: StreamedModel, recipe: Recipe, treatments: Mapping[str, Treatment]
) -> None:
    """Refuse a recipe whose stages cannot act on blocks of this structure.

    Args:
        stream: the model, its blocks still on disk.
        recipe: what to do.
        treatments: of every linear layer, by full name.

    Raises:
        RecipeError: a stage cannot; names it.
    """
    rehearsals = [(i, s, BLOCK_STAGES[s.method].rehearse) for i, s in enumerate(recipe.stages)]
    if all(rehearse is None for _, _, rehearse in rehearsals):
        return
    vocabulary = stream.model.get_input_embeddings().weight.shape[0]
    hidden, arguments = stream.enter(torch.arange(_TOKENS)[None] % vocabulary)
    first = stream.blocks[0]
    stream.load(first.module, first.name)
    groups = observe_block(first.module, hidden, arguments[0], 1, with_hessian=False)
    state = state_of(first.module, first.name, groups, treatments)
    for index, stage, rehearse in rehearsals:
        if rehearse is not None:
            rehearse(state, index, stage)
    stream.release(first.module)
