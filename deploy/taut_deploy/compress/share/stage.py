"""The ``palettize`` stage: every weight becomes an index into a small book of values."""

from taut_deploy.compress.formats.codebook import CodebookFormat, StoredCodebook
from taut_deploy.compress.share.codebook import quantize_weight
from taut_deploy.compress.state import BlockState
from taut_deploy.compress.threads import single_thread
from taut_deploy.recipe.stages import Palettize


def palettize(state: BlockState, index: int, stage: Palettize) -> None:
    """Find books and indices for every layer of the stage.

    Raises:
        ModelError: a weight or an input is not finite; names the layer.
    """
    for layer in state.of_stage(index):
        kept, hessian = layer.format, layer.group.hessian
        if not isinstance(kept, CodebookFormat) or hessian is None:
            raise TypeError(f"{layer.name}: a palettised layer has a codebook format and a Hessian")
        with single_thread():
            coded = quantize_weight(
                layer.sound_weight(),
                hessian,
                kept.spec,
                dampening_frac=stage.dampening_frac,
                refits=stage.refits,
            )
        layer.store(StoredCodebook(kept, coded), stage.method)
