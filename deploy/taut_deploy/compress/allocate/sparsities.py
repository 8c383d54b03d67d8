"""The sparsities a layer may have, and what each of them loses.

Source: OWL, arXiv:2310.05175, §3.2: layers that matter more keep more, each within a bound of the
target. There a layer matters by its outliers; here by what pruning it costs the model
(:mod:`taut_deploy.compress.mixed.scores`), which is measured and names no architecture.
"""

from dataclasses import dataclass

import torch

from taut_deploy.compress.calibrate.observe import InputGroup
from taut_deploy.compress.mixed.scores import Tried
from taut_deploy.compress.prune import magnitude, wanda
from taut_deploy.compress.prune.patterns import Pattern
from taut_deploy.compress.threads import single_thread

_STEP = 0.05
_STEPS = 3
"""Around the target, on each side: predictions are made at the target."""


@dataclass(frozen=True)
class SparsityUnit:
    """Layers that are pruned to the same share.

    Args:
        layers: full names.
        sparsities: that they may have, falling.
        reference: position of the target among them.
        sizes: weights kept at each, by position.
        by_magnitude: whether weights are compared by their size alone.
    """

    layers: tuple[str, ...]
    sparsities: tuple[float, ...]
    reference: int
    sizes: dict[int, int]
    by_magnitude: bool

    def try_layer(self, name: str, weight: torch.Tensor, inputs: InputGroup) -> Tried:
        """Prune to each share without mending; the error is that of the sampled inputs."""
        del name
        square = inputs.sample.square().mean(0)
        errors: dict[int, float] = {}
        at_reference = weight
        for position, sparsity in enumerate(self.sparsities):
            pattern = Pattern(1.0 - sparsity)
            with single_thread():
                mask = (
                    magnitude.mask(weight, pattern)
                    if self.by_magnitude
                    else wanda.mask(weight, square, pattern)
                )
                kept = weight * mask
                wrong = inputs.sample @ (kept - weight).T
                errors[position] = float(wrong.square().sum())
            if position == self.reference:
                at_reference = kept
        return Tried(errors, at_reference)


def sparsity_unit(
    layers: tuple[str, ...], weights: int, target: float, *, by_magnitude: bool
) -> SparsityUnit:
    """What layers may become.

    Args:
        layers: full names.
        weights: of all of them together.
        target: mean sparsity of the stage.
        by_magnitude: whether weights are compared by their size alone.
    """
    around = [round(target + step * _STEP, 6) for step in range(_STEPS, -_STEPS - 1, -1)]
    sparsities = tuple(one for one in around if 0.0 < one < 1.0)
    sizes = {i: round((1.0 - one) * weights) for i, one in enumerate(sparsities)}
    reference = sparsities.index(round(target, 6))
    return SparsityUnit(layers, sparsities, reference, sizes, by_magnitude)
