"""Learned rounding of a block under compression."""

from collections.abc import Mapping

from taut_deploy.compress.quantize.protocol import Codes
from taut_deploy.compress.quantize.rounding import Start, learn_rounding
from taut_deploy.compress.state import BlockState
from taut_deploy.errors import ModelError


def learn_in_block(state: BlockState, starts: Mapping[str, Start], steps: int) -> dict[str, Codes]:
    """Tune layers by the output of the original model's block; see :func:`.learn_rounding`.

    Args:
        state: of the block; its module is not changed but for its dtype.
        starts: layers to tune, by their names in the block.
        steps: of the search.

    Raises:
        ModelError: the block's output is not finite; names the block.
    """
    if state.example is None:
        raise TypeError(f"{state.name}: the recipe said that it needs no target")
    # Earlier stages may have left some weights in fp32; the block is called from here on.
    state.module.to(state.example.inputs.dtype)
    example = state.example
    try:
        return learn_rounding(
            state.module, starts, example.inputs, example.targets, example.call, steps=steps
        )
    except ValueError as error:
        raise ModelError(f"{state.name}: {error}") from error
