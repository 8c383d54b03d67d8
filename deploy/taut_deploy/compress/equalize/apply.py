"""An input's factors: chosen, and applied to its producer, its readers and what is known of it."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch

from taut_deploy.compress.calibrate.observe import InputGroup
from taut_deploy.compress.equalize.fold import Fold, Tie
from taut_deploy.compress.layers_at_once import solve_layers
from taut_deploy.compress.state import BlockState, LayerState

# (layers that read an input, what ties its factors) -> its factors [K], None to leave it as it is
Choose = Callable[[Sequence[LayerState], Tie], torch.Tensor | None]


def apply_scales(
    group: InputGroup, layers: Sequence[LayerState], fold: Fold, scales: torch.Tensor
) -> None:
    """Divide an input by factors and multiply the weights that read it; the statistics follow.

    Args:
        group: the input.
        layers: that read it.
        fold: where its producer takes the factors.
        scales: [K] factors.
    """
    scales = fold.apply(scales)
    for layer in layers:
        # fp32 until it is stored.
        layer.module.weight.data = layer.module.weight.data.float() * scales
    group.absmax = group.absmax / scales
    group.sample = group.sample / scales
    if group.hessian is not None:
        group.hessian = group.hessian / scales[:, None] / scales[None, :]


def choose_together(
    state: BlockState, folds: Sequence[tuple[InputGroup, Fold]], choose: Choose
) -> Iterator[tuple[InputGroup, Fold, list[LayerState], torch.Tensor]]:
    """Choose the factors of several inputs side by side, before any of them is applied.

    A producer works before the readers of what it produces: factors of an input change weights
    that read an earlier one alone.

    Args:
        state: of the block.
        folds: inputs, and where their producers take factors.
        choose: the factors of one input.

    Yields:
        Input, fold, the layers that read it, and factors that are not all 1.
    """
    members = [[state.layers[name] for name in group.layers] for group, _ in folds]
    ties = {each[0].name: fold.tie for each, (_, fold) in zip(members, folds, strict=True)}

    def solve(layers: Sequence[LayerState]) -> list[torch.Tensor | None]:
        return [choose(layers, ties[layers[0].name])] * len(layers)

    readers = [*chain.from_iterable(members)]
    found = zip(readers, solve_layers(solve, readers, state.devices), strict=True)
    chosen = {layer.name: scales for layer, scales in found}
    for each, (group, fold) in zip(members, folds, strict=True):
        scales = chosen[each[0].name]
        if scales is not None and not bool((scales == 1).all()):
            yield group, fold, each, scales
