"""``docs/compression.md`` names what there is: every shipped recipe, every stage."""

from __future__ import annotations

import re
from pathlib import Path

from taut_deploy.recipe import builtin_recipes, parse_recipe
from taut_deploy.recipe.stages import STAGE_MODELS

PAGE = (Path(__file__).parents[2] / "docs" / "compression.md").read_text(encoding="utf-8")


def names_of(section: str) -> list[str]:
    """The code in the first column of a section's table."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    first = re.findall(r"(?m)^\| (`[^|]*`) \|", text)
    return [name for cell in first for name in re.findall(r"`([^`]+)`", cell)]


def test_every_shipped_recipe_has_one_row():
    assert sorted(names_of("Recipes")) == sorted(builtin_recipes())


def test_every_stage_has_one_row():
    assert sorted(names_of("Stages")) == sorted(STAGE_MODELS)


def test_the_recipe_on_the_page_is_one():
    recipe = parse_recipe(re.findall(r"(?s)```yaml\n(.*?)```", PAGE)[0], "docs/compression.md")
    assert [stage.method for stage in recipe.stages] == ["slim", "quantize", "distil"]


def test_measured_recipes_are_shipped():
    assert set(names_of("What it costs")) <= set(builtin_recipes())
