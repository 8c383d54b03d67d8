"""A recipe as a configuration of optimum: saved beside a model, loaded, shared on a hub."""

from typing import Any

import yaml
from optimum.configuration_utils import BaseConfig

from taut_deploy.recipe import Recipe, load_recipe, parse_recipe


class TautConfig(BaseConfig):  # type: ignore[misc]  # optimum has no types
    """A compression recipe in ``taut_recipe.json``.

    Args:
        recipe: the recipe as plain data, as :meth:`taut_deploy.recipe.Recipe.as_json` gives it.
        kwargs: what every configuration of transformers takes.

    Raises:
        RecipeError: a key or value of the recipe is wrong; names it.
    """

    CONFIG_NAME = "taut_recipe.json"
    FULL_CONFIGURATION_FILE = "taut_recipe.json"
    model_type = "taut"

    def __init__(self, recipe: dict[str, Any] | None = None, **kwargs: Any) -> None:
        # transformers makes one without arguments, to tell what differs from the defaults.
        self.recipe = {} if recipe is None else _checked(recipe).as_json()
        super().__init__(**kwargs)

    @classmethod
    def from_recipe(cls, reference: str) -> "TautConfig":
        """The configuration of a built-in recipe's name or a YAML file.

        Raises:
            RecipeError: there is none, or it is wrong.
        """
        return cls(recipe=load_recipe(reference).as_json())

    def to_recipe(self) -> Recipe:
        """The recipe.

        Raises:
            RecipeError: the configuration holds none, or a wrong one.
        """
        return _checked(self.recipe)


def _checked(recipe: dict[str, Any]) -> Recipe:
    return parse_recipe(yaml.safe_dump(recipe), TautConfig.CONFIG_NAME)
