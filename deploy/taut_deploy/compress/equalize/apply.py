"""Apply an input's factors: to its producer, the layers that read it, and what is known of it."""

from collections.abc import Sequence

import torch

from taut_deploy.compress.calibrate.observe import InputGroup
from taut_deploy.compress.equalize.fold import Fold
from taut_deploy.compress.state import LayerState


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
