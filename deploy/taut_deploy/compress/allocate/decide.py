"""A stage with ``allocation: loss``: what its scores decide."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from taut_deploy.compress.allocate.ranks import RankUnit, rank_unit
from taut_deploy.compress.allocate.sparsities import SparsityUnit, sparsity_unit
from taut_deploy.compress.formats.low_rank import low_rank_format
from taut_deploy.compress.mixed.knapsack import Option, within_bytes
from taut_deploy.compress.mixed.scored_recipe import ScoredRecipe
from taut_deploy.compress.mixed.scores import SEQUENCES, Scoring
from taut_deploy.compress.plan import shapes_of
from taut_deploy.compress.source.decoder import DecoderBlock
from taut_deploy.compress.source.stream import StreamedModel
from taut_deploy.recipe import Factorize, Prune, Recipe, is_allocated, is_matched

_EXPERTS = ".experts."
# A Hessian of fewer tokens than inputs is mostly damping, and its spectrum too steep.
_SPECTRUM_SEQUENCES = 64

AllocationUnit = RankUnit | SparsityUnit


@dataclass(frozen=True)
class Allocation(ScoredRecipe):
    """A recipe one stage of which does not know yet what each layer gets.

    Args:
        recipe: with the stage.
        index: position of that stage.
        stream: the model.
        units: what is decided together, in the model's order.
    """

    recipe: Recipe
    index: int
    stream: StreamedModel
    units: Sequence[AllocationUnit]

    kept_as: ClassVar[str] = "allocation"

    def _scores(
        self, tokens: torch.Tensor, progress: Callable[[DecoderBlock], None]
    ) -> list[dict[str, Any]]:
        ranked = isinstance(self.recipe.stages[self.index], Factorize)
        scoring = Scoring(
            self.stream,
            tokens,
            self.units,
            observed=_SPECTRUM_SEQUENCES if ranked else SEQUENCES,
            with_hessian=ranked,
        )
        return [one.losses for one in scoring.run(progress)]

    def _resolved(self, scores: list[dict[str, Any]]) -> tuple[Recipe, dict[str, Any]]:
        chosen = allocate(self.units, scores)
        stage, stages = self.recipe.stages[self.index], list(self.recipe.stages)
        values: dict[str, Any] = {
            name: _value(unit, option)
            for unit, option in zip(self.units, chosen, strict=True)
            for name in unit.layers
        }
        if not isinstance(stage, Prune | Factorize):
            raise AssertionError("only 'prune' and 'factorize' are allocated")
        stages[self.index] = stage.allocated(values)
        equal = sum(score[str(u.reference)] for u, score in zip(self.units, scores, strict=True))
        told = {
            "stage": self.index,
            "predicted_kl": sum(option.loss for option in chosen),
            "predicted_kl_of_equal_shares": equal,
            "layers": values,
        }
        return self.recipe.model_copy(update={"stages": tuple(stages)}), {"allocation": told}


def _value(unit: AllocationUnit, option: Option) -> int | float:
    """The rank or the sparsity that an option stands for."""
    at = option.candidate
    return at if isinstance(unit, RankUnit) else unit.sparsities[at]


def allocate(
    units: Sequence[AllocationUnit], losses: Sequence[Mapping[str, float]]
) -> list[Option]:
    """Least predicted loss in the size that equal shares take.

    Args:
        units: what is decided together.
        losses: of each unit, in nats, by the candidate as text.

    Returns:
        The candidate of each unit.
    """
    options = [
        [Option(one, size, loss[str(one)]) for one, size in unit.sizes.items()]
        for unit, loss in zip(units, losses, strict=True)
    ]
    budget = sum(unit.sizes[unit.reference] for unit in units)
    chosen = within_bytes(options, budget)
    if chosen is None:
        raise AssertionError("equal shares fit their own size")
    return chosen


def allocation_of(stream: StreamedModel, recipe: Recipe, dtype: torch.dtype) -> Allocation | None:
    """What is to be decided; None for a recipe whose stages give every layer the same.

    Args:
        stream: the model.
        recipe: as it was asked for; known to fit the model with equal shares.
        dtype: of the model's weights.
    """
    for index, stage in enumerate(recipe.stages):
        if isinstance(stage, Prune | Factorize) and is_allocated(stage):
            shapes = {
                name: shape
                for name, shape in shapes_of(stream).items()
                if stage.selects(name) and not is_matched(name, recipe.ignore)
            }
            return Allocation(recipe, index, stream, _units(stage, shapes, dtype))
    return None


def _units(
    stage: Prune | Factorize, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype
) -> list[AllocationUnit]:
    if isinstance(stage, Factorize):
        equal = low_rank_format(stage, {k for _, k in shapes.values()}, dtype)
        return [
            rank_unit(name, shape, equal, stage.dampening_frac) for name, shape in shapes.items()
        ]
    groups: dict[str, list[str]] = {}
    for name in shapes:  # the experts of a block together: by themselves they are too many
        mixture, is_expert, _ = name.partition(_EXPERTS)
        groups.setdefault(mixture if is_expert else name, []).append(name)
    return [
        sparsity_unit(
            tuple(names),
            sum(shapes[name][0] * shapes[name][1] for name in names),
            float(stage.sparsity or 0.0),
            by_magnitude=stage.algorithm == "magnitude",
        )
        for names in groups.values()
    ]
