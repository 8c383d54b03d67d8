"""Mixed precision in a run: what its scores decide."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from taut_deploy.compress.mixed.choose import Shapes, choose, resolved, units_of
from taut_deploy.compress.mixed.scored_recipe import ScoredRecipe
from taut_deploy.compress.mixed.scores import Scoring, Unit
from taut_deploy.compress.plan import shapes_of
from taut_deploy.compress.source.decoder import DecoderBlock
from taut_deploy.compress.source.stream import StreamedModel
from taut_deploy.compress.tables import tables_of
from taut_deploy.recipe import Mixed, Recipe


@dataclass(frozen=True)
class Mixing(ScoredRecipe):
    """A recipe whose ``mixed`` stage becomes ordinary ones.

    Args:
        recipe: with the stage.
        stage: that one.
        stream: the model.
        shapes: [N, K] of each linear layer of the blocks, by full name.
        units: what is decided together.
        other_bytes: size of the weights that the stage does not store.
    """

    recipe: Recipe
    stage: Mixed
    stream: StreamedModel
    shapes: Shapes
    units: list[Unit]
    other_bytes: int

    kept_as: ClassVar[str] = "scores"

    def _scores(
        self, tokens: torch.Tensor, progress: Callable[[DecoderBlock], None]
    ) -> list[dict[str, Any]]:
        scoring = Scoring(self.stream, tokens, self.units)
        return [one.as_json() for one in scoring.run(progress)]

    def _resolved(self, scores: list[dict[str, Any]]) -> tuple[Recipe, dict[str, Any]]:
        losses = [one["losses"] for one in scores]
        choice = choose(self.stage, self.units, losses, self.shapes, self.other_bytes)
        recipe = resolved(self.recipe, self.stage, self.units, choice)
        return recipe, {"mixture": choice.as_json()}


def mixing_of(
    stream: StreamedModel, recipe: Recipe, directory: Path, dtype: torch.dtype
) -> Mixing | None:
    """What is to be decided; None for a recipe without a ``mixed`` stage.

    Args:
        stream: the model.
        recipe: as it was asked for.
        directory: of the model.
        dtype: of its weights.

    Raises:
        RecipeError: the stage has no layer, or no candidate fits one.
    """
    stage = next((one for one in recipe.stages if isinstance(one, Mixed)), None)
    if stage is None:
        return None
    shapes = shapes_of(stream)
    units = units_of(stage, recipe, shapes, dtype)
    dense = sum(shapes[name][0] * shapes[name][1] for unit in units for name in unit.layers)
    whole = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    saved = sum(
        table.bytes_before - table.bytes for table in tables_of(stream.model, recipe, dtype)
    )
    other = whole - dense * dtype.itemsize - saved
    return Mixing(recipe, stage, stream, shapes, units, other)
