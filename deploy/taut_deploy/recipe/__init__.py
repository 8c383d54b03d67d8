"""Recipes: what to do to a model, parsed once, unknown keys refused.

A recipe is YAML: an ordered list of ``stages``. Transforms come first, then pruning, then at most
one storing stage for every layer; each stage picks its layers by patterns. A new method adds one
model to :mod:`taut_deploy.recipe.stages` and one function to :mod:`taut_deploy.compress.stages`.
"""

from taut_deploy.recipe.patterns import is_matched, matches
from taut_deploy.recipe.recipe import (
    Calibration,
    KvCache,
    Recipe,
    builtin_recipes,
    is_allocated,
    load_recipe,
    parse_recipe,
)
from taut_deploy.recipe.stage import Order, StageModel
from taut_deploy.recipe.stages import (
    Awq,
    Distil,
    Factorize,
    Mixed,
    Prune,
    Qat,
    Quantize,
    Rotate,
    Slim,
    Smooth,
    Stage,
    Training,
)
from taut_deploy.recipe.tables import Table
from taut_deploy.recipe.target import parse_size, with_target

__all__ = [
    "Awq",
    "Calibration",
    "Distil",
    "Factorize",
    "KvCache",
    "Mixed",
    "Order",
    "Prune",
    "Qat",
    "Quantize",
    "Recipe",
    "Rotate",
    "Slim",
    "Smooth",
    "Stage",
    "StageModel",
    "Table",
    "Training",
    "builtin_recipes",
    "is_allocated",
    "is_matched",
    "load_recipe",
    "matches",
    "parse_recipe",
    "parse_size",
    "with_target",
]
