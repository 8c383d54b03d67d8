"""What the parts of ``taut.json`` may hold: checked before any of it is looked up by name."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from taut_deploy.documents import first_problem


class _Open(BaseModel):
    """Holds more than is used."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Recipe(_Open):
    name: str = ""


class _Calibration(_Open):
    description: str = ""
    hash: str = ""


class _Layer(_Open):
    name: str = ""
    group_size: int | None = None
    density: FiniteFloat = 1.0


class _Measured(_Open):
    estimate: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat


class _Validation(_Open):
    verdict: str
    policy: str = ""
    metrics: dict[str, _Measured] = Field(default_factory=dict)


class _Parts(_Open):
    recipe: _Recipe
    calibration: _Calibration
    layers: list[_Layer]
    validation: _Validation | None = None


def why_parts_refused(manifest: dict[str, Any]) -> str | None:
    """``key: what is wrong with it`` of a manifest's parts; None if nothing is.

    Args:
        manifest: as plain data.
    """
    try:
        _Parts.model_validate(manifest)
    except ValidationError as error:
        return first_problem(error)
    return None
