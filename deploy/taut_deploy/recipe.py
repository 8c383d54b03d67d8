"""Recipes: what to do to a model, parsed once, unknown keys refused.

A recipe is YAML. ``stages`` run per decoder block in the order written; today that is an optional
``smooth`` followed by one ``quantize``. Each later method adds one model here and one file under
``compress/``.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from taut_deploy.errors import RecipeError
from taut_deploy.files import sha256_json
from taut_deploy.strict_yaml import (
    parse_mapping,
    read_shipped_or_file,
    shipped_names,
    validate_mapping,
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Calibration(_Strict):
    """Where calibration tokens come from; never the text a result is judged on.

    ``source`` is ``corpus`` (public-domain prose from a pinned package), ``self`` (sampled from the
    model) or ``file`` with ``path``.
    """

    source: Literal["corpus", "self", "file"] = "corpus"
    path: str | None = None
    sequences: Annotated[int, Field(ge=1, le=4096)] = 32
    sequence_length: Annotated[int, Field(ge=16, le=32768)] = 512
    seed: int = 0

    @model_validator(mode="after")
    def _path_goes_with_file(self) -> "Calibration":
        if (self.source == "file") != (self.path is not None):
            raise ValueError("'path' is given exactly when 'source' is 'file'")
        return self


class Smooth(_Strict):
    """Move activation outliers into the weights (SmoothQuant, arXiv:2211.10438, §4).

    ``alpha`` is the migration strength, or ``auto`` to choose it per input group by measured output
    error.
    """

    method: Literal["smooth"] = "smooth"
    alpha: Annotated[float, Field(ge=0.0, le=1.0)] | Literal["auto"] = "auto"


class Quantize(_Strict):
    """Round weights (and for W8A8 activations) to integers.

    ``group_size`` is an upper bound: the largest of 128, 64, 32 that is not above it and divides
    every layer is used. ``act_order`` orders GPTQ's columns by importance while groups stay in
    place, so the file needs no index.
    """

    method: Literal["quantize"] = "quantize"
    scheme: Literal["W8A8", "W4A16"]
    algorithm: Literal["rtn", "gptq"] = "gptq"
    group_size: Literal[32, 64, 128] | None = None
    symmetric: bool = True
    act_order: bool = True
    dampening_frac: Annotated[float, Field(gt=0.0, le=1.0)] = 0.01

    @model_validator(mode="after")
    def _fits_scheme(self) -> "Quantize":
        if self.scheme == "W8A8" and (self.group_size is not None or not self.symmetric):
            raise ValueError(
                "W8A8 is per-channel and symmetric: drop 'group_size' and 'symmetric: false'"
            )
        if self.scheme == "W4A16" and self.group_size is None:
            raise ValueError("W4A16 needs 'group_size' (32, 64 or 128)")
        return self

    @property
    def num_bits(self) -> int:
        """Bits per weight, scales not counted."""
        return 8 if self.scheme == "W8A8" else 4


Stage = Annotated[Smooth | Quantize, Field(discriminator="method")]


class Recipe(_Strict):
    """One compression recipe."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$")]
    description: str = ""
    calibration: Calibration = Calibration()
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    ignore: tuple[str, ...] = ("lm_head",)

    @model_validator(mode="after")
    def _quantize_comes_last(self) -> "Recipe":
        methods = [stage.method for stage in self.stages]
        if (
            methods.count("quantize") != 1
            or methods[-1] != "quantize"
            or methods.count("smooth") > 1
        ):
            raise ValueError("'stages' must be an optional 'smooth' followed by one 'quantize'")
        return self

    @property
    def quantize(self) -> Quantize:
        """The quantisation stage."""
        stage = self.stages[-1]
        if not isinstance(stage, Quantize):
            raise TypeError("validated recipes end in a quantize stage")
        return stage

    @property
    def smooth(self) -> Smooth | None:
        """The smoothing stage, if there is one."""
        first = self.stages[0]
        return first if isinstance(first, Smooth) else None

    def as_json(self) -> dict[str, object]:
        """The recipe as plain data, defaults filled in."""
        return self.model_dump(mode="json")

    @property
    def hash(self) -> str:
        """``sha256:`` over everything that changes the result (name and description do not)."""
        return "sha256:" + sha256_json(
            self.model_dump(mode="json", exclude={"name", "description"})
        )


def builtin_recipes() -> list[str]:
    """Names of the recipes that ship with taut."""
    return shipped_names("taut_deploy", "recipes")


def load_recipe(reference: str) -> Recipe:
    """Load a recipe by built-in name or from a YAML file.

    Raises:
        RecipeError: no such recipe, not YAML, or a wrong key or value (named).
    """
    text = read_shipped_or_file(reference, "taut_deploy", "recipes", "recipe", RecipeError)
    return parse_recipe(text, reference)


def parse_recipe(text: str, origin: str) -> Recipe:
    """Parse recipe YAML; ``origin`` is named in errors.

    Raises:
        RecipeError: naming the key and what is wrong with it.
    """
    data = parse_mapping(text, origin, RecipeError, "'name' and 'stages'")
    return validate_mapping(Recipe, data, origin, RecipeError)
