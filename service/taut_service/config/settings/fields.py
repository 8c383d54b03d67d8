"""Field types that several sections share, and what every section is: strict, frozen, closed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Scalar = str | int | float | bool | None
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")]
Port = Annotated[int, Field(ge=1, le=65_535)]
PortOrAny = Annotated[int, Field(ge=0, le=65_535)]
"""0 takes any free port."""
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class Section(BaseModel):
    """A mapping of the file: unknown keys refused, no conversion between types, immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def refuse_duplicates(what: str, names: Sequence[str]) -> None:
    """Insist that names differ.

    Args:
        what: the word for the error, such as ``worker``.
        names: all of them.

    Raises:
        ValueError: two are equal.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"two entries share the {what} name {name!r}")
        seen.add(name)
