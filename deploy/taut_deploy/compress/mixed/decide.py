"""Mixed precision in a run: scored once, the scores kept in its workspace."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from taut_deploy.compress.mixed.choose import Shapes, choose, resolved, units_of
from taut_deploy.compress.mixed.scores import Scoring, Unit
from taut_deploy.compress.plan import shapes_of
from taut_deploy.compress.source.decoder import DecoderBlock
from taut_deploy.compress.source.stream import StreamedModel
from taut_deploy.compress.tables import tables_of
from taut_deploy.compress.workspace import Workspace
from taut_deploy.recipe import Mixed, Recipe

_SCORES = "scores"


@dataclass(frozen=True)
class Mixing:
    """A recipe whose ``mixed`` stage is not decided yet.

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

    def decided(
        self,
        workspace: Workspace,
        tokens: Callable[[], torch.Tensor],
        progress: Callable[[DecoderBlock], None],
    ) -> tuple[Recipe, dict[str, Any]]:
        """The recipe with ordinary stages, and what the manifest says of the choice.

        Args:
            workspace: keeps the scores.
            tokens: makes those of the calibration, [B, T].
            progress: told each block before it is scored.

        Raises:
            RecipeError: the target cannot be met.
        """

        def score() -> list[dict[str, Any]]:
            scoring = Scoring(self.stream, tokens(), self.units)
            return [one.as_json() for one in scoring.run(progress)]

        scores = workspace.once(_SCORES, score)
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
