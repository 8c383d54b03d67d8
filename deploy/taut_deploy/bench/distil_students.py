"""The students of ``taut bench distil``: how each is made of the base model, and how it learns."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from taut_deploy.bench.distil_layers import Changed, LayerJob, change_layers
from taut_deploy.compress import driver
from taut_deploy.compress.lowrank.whitened_svd import whiten
from taut_deploy.compress.shrink.shrink import ShrinkJob, shrink
from taut_deploy.models.store import ModelRecord
from taut_deploy.recipe import Calibration, Recipe


@dataclass(frozen=True)
class Place:
    """Where students are made, and of what.

    Args:
        base: the model.
        calibration: ``corpus`` or a text file.
        sequences: of the calibration.
        sequence_length: tokens of each.
        cache: where the corpus is kept.
        device: ``cpu`` or ``cuda``.
    """

    base: ModelRecord
    calibration: str
    sequences: int
    sequence_length: int
    cache: Path
    device: str

    def asked(self) -> Calibration:
        """The calibration as a recipe says it."""
        of_corpus = self.calibration == "corpus"
        return Calibration(
            source="corpus" if of_corpus else "file",
            path=None if of_corpus else self.calibration,
            sequences=self.sequences,
            sequence_length=self.sequence_length,
        )


Make = Callable[[Place, Path], object]


@dataclass(frozen=True)
class Student:
    """One row of the table.

    Args:
        what: it is, for people.
        make: makes it in a directory, or finds it there.
        settings: of its training, where they differ from the defaults.
    """

    what: str
    make: Make
    settings: dict[str, Any] = field(default_factory=dict)


def _by_recipe(name: str, *stages: dict[str, Any]) -> Make:
    def make(place: Place, output: Path) -> object:
        recipe = Recipe.model_validate(
            {"name": name, "calibration": place.asked().model_dump(), "stages": list(stages)}
        )
        return driver.compress(
            driver.CompressionJob(place.base, recipe, output, place.cache, place.device)
        )

    return make


def _shrunk(**shares: float) -> Make:
    def make(place: Place, output: Path) -> object:
        text = (place.calibration,)
        size = (place.sequences, place.sequence_length, place.device)
        return shrink(ShrinkJob(place.base, output, shares, text, place.cache, *size))

    return make


def _low_rank(share: float) -> Make:
    def change(weight: torch.Tensor, hessian: torch.Tensor) -> Changed | None:
        n, k = weight.shape
        rank = int(share * n * k / (n + k)) // 8 * 8
        if not 1 <= rank < min(n, k):
            return None
        # On the CPU, where a singular value decomposition in fp64 is faster.
        factors = whiten(weight.cpu(), hessian.cpu()).truncate(rank)
        return Changed(factors.product(), {"method": "whitened svd", "rank": rank})

    def make(place: Place, output: Path) -> object:
        stage = {"method": "whitened svd", "parameters": share}
        job = LayerJob(place.base, stage, place.asked(), place.cache, place.device)
        return change_layers(job, change, output)

    return make


_PRUNE = {"method": "prune", "algorithm": "sparsegpt"}
_W4 = {"method": "quantize", "scheme": "W4A16", "group_size": 64, "algorithm": "gptq"}

STUDENTS = {
    "w4": Student(
        "W4A16, groups of 64, GPTQ",
        _by_recipe("w4a16-g64", _W4),
        {"start": "cells", "learning_rate": 2e-4},
    ),
    "sparse50": Student(
        "50 % of weights, SparseGPT",
        _by_recipe("sparse50", {**_PRUNE, "sparsity": 0.5}),
        {"learning_rate": 3e-4},
    ),
    "sparse24": Student(
        "2:4, SparseGPT",
        _by_recipe("sparse24", {**_PRUNE, "pattern": "2:4"}),
        {"learning_rate": 5e-4},
    ),
    "lowrank": Student("low rank, 80 % of parameters", _low_rank(0.8), {"learning_rate": 5e-4}),
    "ffn": Student("75 % of FFN neurons", _shrunk(ffn=0.75), {"learning_rate": 1e-3}),
    "depth": Student("75 % of blocks", _shrunk(depth=0.75), {"learning_rate": 1e-3}),
}
"""By the name that ``--only`` takes."""
