"""The ``palettize`` stage: every weight becomes an index into a small book of values."""

from collections.abc import Sequence
from functools import partial

from taut_deploy.compress.formats.codebook import CodebookFormat, StoredCodebook
from taut_deploy.compress.layers_at_once import solve_layers
from taut_deploy.compress.quantize.gptq import feedback_of
from taut_deploy.compress.reconstruct import Indexed, reconstruct
from taut_deploy.compress.share.codebook import CodebookWeight, in_rising_order, quantize_weight
from taut_deploy.compress.share.learned import learn_indices
from taut_deploy.compress.state import BlockState, LayerState
from taut_deploy.compress.threads import single_thread
from taut_deploy.recipe.stages import Palettize


def palettize(state: BlockState, index: int, stage: Palettize) -> None:
    """Find books and indices for every layer of the stage.

    Raises:
        ModelError: a weight or an input is not finite; names the layer.
    """
    layers = state.named_of_stage(index)
    found = solve_layers(partial(_coded, stage=stage), layers.values(), state.devices)
    coded = dict(zip(layers, found, strict=True))
    method: str = stage.method
    if stage.steps is not None:
        coded = _reconstructed(state, learn_indices(state, coded, stage.steps), stage.steps)
        method += "+round+reconstruct"
    for name, weight in coded.items():
        layer = state.layers[name]
        layer.store(StoredCodebook(_format_of(layer), weight), method)


def _coded(layers: Sequence[LayerState], *, stage: Palettize) -> list[CodebookWeight]:
    """Books and indices of layers that read one input."""
    with single_thread():
        hessian = layers[0].hessian()
        feedback = feedback_of(hessian, dampening_frac=stage.dampening_frac)
        return [
            quantize_weight(
                layer.sound_weight(),
                hessian,
                feedback,
                _format_of(layer).spec,
                refits=stage.refits,
            )
            for layer in layers
        ]


def _reconstructed(
    state: BlockState, coded: dict[str, CodebookWeight], steps: int
) -> dict[str, CodebookWeight]:
    """The same indices, books and scales fitted to the block's output."""
    fitted = {
        name: Indexed(one.codes, one.book.float(), one.scale.float()) for name, one in coded.items()
    }
    reconstruct(state, fitted, steps)
    return {
        name: in_rising_order(
            CodebookWeight(
                one.codes,
                fitted[name].book.detach().to(one.book.dtype),
                fitted[name].scale.detach().to(one.scale.dtype),
            )
        )
        for name, one in coded.items()
    }


def _format_of(layer: LayerState) -> CodebookFormat:
    if not isinstance(layer.format, CodebookFormat):
        raise TypeError(f"{layer.name}: a palettised layer has a codebook format")
    return layer.format
