"""What each of a recipe's block stages does: one function a method.

A stage gets the block's state, its own position in the recipe and its model. The layers it acts on
are ``state.of_stage(index)``. A new one is a model in :mod:`taut_deploy.recipe.stages`, a function
in a file of its own, and a line here.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from taut_deploy.compress.equalize.awq_stage import awq
from taut_deploy.compress.equalize.smooth_stage import smooth
from taut_deploy.compress.formats.codebook import codebook_format
from taut_deploy.compress.formats.low_rank import low_rank_format, of_layer
from taut_deploy.compress.formats.protocol import LayerFormat
from taut_deploy.compress.lowrank.stage import factorize
from taut_deploy.compress.prune.stage import prune, why_not_pruned
from taut_deploy.compress.quantize.quanto import quanto, quanto_format
from taut_deploy.compress.quantize.stage import quantize, quantized_format
from taut_deploy.compress.share.stage import palettize
from taut_deploy.compress.state import BlockState

Run = Callable[[BlockState, int, Any], None]
# (stage, N, K) -> why a layer of this shape cannot have the stage; None if it can
WhyNot = Callable[[Any, int, int], str | None]
# (stage, K of its layers, dtype of the model's weights) -> what those layers are stored in
ChooseFormat = Callable[[Any, Collection[int], torch.dtype], LayerFormat]
# (stage, what its layers are stored in, full name of one) -> what that one is stored in
OfLayer = Callable[[Any, Any, str], LayerFormat]


@dataclass(frozen=True)
class BlockStage:
    """What a method does.

    Attributes:
        run: acts on a block's state.
        choose_format: for a storing stage, the format of its layers, known before anything runs.
        why_not: what shapes the method cannot work on, known before anything runs.
        of_layer: for a storing stage whose layers may differ, the format of one of them.
    """

    run: Run
    choose_format: ChooseFormat | None = None
    why_not: WhyNot | None = None
    of_layer: OfLayer | None = None


def _decided_before(_state: BlockState, _index: int, _stage: Any) -> None:
    raise TypeError("'mixed' has become 'quantize' stages before any block is compressed")


BLOCK_STAGES: dict[str, BlockStage] = {
    "smooth": BlockStage(smooth),
    "awq": BlockStage(awq),
    "prune": BlockStage(prune, why_not=why_not_pruned),
    "quantize": BlockStage(quantize, quantized_format),
    "quanto": BlockStage(quanto, quanto_format),
    "mixed": BlockStage(_decided_before),
    "factorize": BlockStage(factorize, low_rank_format, of_layer=of_layer),
    "palettize": BlockStage(palettize, codebook_format),
}
