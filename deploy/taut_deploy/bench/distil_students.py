"""The students of ``taut bench distil``: how each is made of the base model, and how it learns."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from taut_deploy.checkpoint import Manifest
from taut_deploy.compress import pipeline
from taut_deploy.compress.job import CompressionJob
from taut_deploy.models.store import ModelRecord
from taut_deploy.recipe import Recipe


@dataclass(frozen=True)
class Place:
    """Where students are made, and of what.

    Args:
        base: the model.
        calibration: ``corpus``, ``articles`` or a text file.
        sequences: of the calibration.
        sequence_length: tokens of each.
        cache: where the corpus is kept.
        device: ``cpu`` or ``cuda``.
        fit_steps: of the stages that take steps, to fit what is left to each block's output.
    """

    base: ModelRecord
    calibration: str
    sequences: int
    sequence_length: int
    cache: Path
    device: str
    fit_steps: int = 0

    def recipe(self, name: str, stage: dict[str, Any]) -> Recipe:
        """The recipe of one stage with this calibration."""
        built_in = self.calibration in ("corpus", "articles")
        where = {"source": "file", "path": self.calibration}
        source = {"source": self.calibration} if built_in else where
        size = {"sequences": self.sequences, "sequence_length": self.sequence_length}
        return Recipe.model_validate(
            {"name": name, "calibration": {**source, **size}, "stages": [stage]}
        )


@dataclass(frozen=True)
class Student:
    """One row of the table.

    Args:
        what: it is, for people.
        stage: of the recipe that makes it.
        settings: of its training, where they differ from the defaults.
        fitted: keys of the stage that differ where it is fitted by steps; None takes no steps.
    """

    what: str
    stage: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    fitted: dict[str, Any] | None = None

    def make(self, place: Place, output: Path) -> Manifest:
        """Make it in a directory, or find it there.

        Raises:
            TautError: as ``taut compress``.
        """
        stage = self.stage
        if place.fit_steps and self.fitted is not None:
            stage = {**stage, **self.fitted, "steps": place.fit_steps}
        recipe = place.recipe(output.name, stage)
        return pipeline.compress(
            CompressionJob(place.base, recipe, output, place.cache, place.device)
        )


_W4 = {"method": "quantize", "scheme": "W4A16", "group_size": 64, "algorithm": "gptq"}
_PRUNE = {"method": "prune", "algorithm": "sparsegpt"}
_LOW_RANK = {"method": "factorize", "rank_budget": 0.8}

STUDENTS = {
    "w4": Student(
        "W4A16, groups of 64",
        _W4,
        {"start": "cells", "learning_rate": 2e-4},
        fitted={"algorithm": "round"},
    ),
    "sparse50": Student(
        "50 % of weights, SparseGPT",
        {**_PRUNE, "sparsity": 0.5},
        {"learning_rate": 3e-4},
        fitted={},
    ),
    "sparse24": Student(
        "2:4, SparseGPT", {**_PRUNE, "pattern": "2:4"}, {"learning_rate": 5e-4}, fitted={}
    ),
    "lowrank": Student(
        "low rank, 80 % of parameters", _LOW_RANK, {"learning_rate": 5e-4}, fitted={}
    ),
    "ffn": Student("75 % of FFN neurons", {"method": "slim", "ffn": 0.75}, {"learning_rate": 1e-3}),
    "depth": Student("75 % of blocks", {"method": "slim", "depth": 0.75}, {"learning_rate": 1e-3}),
}
"""By the name that ``--only`` takes."""
