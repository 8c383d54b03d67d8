"""Another target for a recipe's ``mixed`` stage than the one it was written with."""

import re

from pydantic import ValidationError

from taut_deploy.documents import first_problem
from taut_deploy.errors import RecipeError
from taut_deploy.recipe.recipe import Recipe
from taut_deploy.recipe.stages import Mixed

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?")


def with_target(
    recipe: Recipe, target_bits: float | None, target_bytes: str | None, max_kl: float | None
) -> Recipe:
    """The recipe aimed at what flags ask for; itself where they ask for nothing.

    Args:
        recipe: with or without a ``mixed`` stage.
        target_bits: value of ``--target-bits``.
        target_bytes: value of ``--target-bytes``, such as ``5GiB``.
        max_kl: value of ``--max-kl``.

    Raises:
        RecipeError: several flags, a wrong value, or no ``mixed`` stage; names the flag.
    """
    given: dict[str, float | str] = {
        flag: value
        for flag, value in (
            ("--target-bits", target_bits),
            ("--target-bytes", target_bytes),
            ("--max-kl", max_kl),
        )
        if value is not None
    }
    if not given:
        return recipe
    if len(given) > 1:
        raise RecipeError(f"{' and '.join(given)}: give one of them")
    (flag,) = given
    if not any(isinstance(stage, Mixed) for stage in recipe.stages):
        raise RecipeError(
            f"{flag}: recipe {recipe.name!r} has no 'mixed' stage; take --recipe mixed"
        )
    size = None if target_bytes is None else parse_size(target_bytes, "--target-bytes")
    wanted = {"target_bits": target_bits, "target_bytes": size, "max_kl": max_kl}
    try:
        stages = tuple(
            Mixed.model_validate({**stage.model_dump(), **wanted})
            if isinstance(stage, Mixed)
            else stage
            for stage in recipe.stages
        )
    except ValidationError as error:
        raise RecipeError(f"{flag}: {first_problem(error)}") from error
    return recipe.model_copy(update={"stages": stages})


def parse_size(text: str, flag: str) -> int:
    """A size in words as a number of bytes.

    Args:
        text: such as ``5GiB``, ``800MB`` or ``1000000``.
        flag: named in the error.

    Raises:
        RecipeError: it is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise RecipeError(f"{flag}: {text[:40]!r} is no size; write it as 5GiB, 800MB or a number")
    return int(float(found[1]) * _UNITS[found[2] or ""])
