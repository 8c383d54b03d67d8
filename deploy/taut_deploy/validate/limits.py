"""What every section of a policy is made of: strict models, numbers, and limits."""

import math
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]


class Strict(BaseModel):
    """Unknown keys are refused; nothing changes after parsing."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Limit(Strict):
    """An upper limit, a lower limit, or both."""

    max: Number | None = None
    min: Number | None = None

    @model_validator(mode="after")
    def _has_a_side(self) -> "Limit":
        if self.max is None and self.min is None:
            raise ValueError("give 'max', 'min' or both")
        if self.max is not None and self.min is not None and self.min > self.max:
            raise ValueError(f"'min' {self.min} is above 'max' {self.max}")
        return self

    @property
    def sides(self) -> tuple[tuple[str, float], ...]:
        """The limits that were given as (``max`` or ``min``, value)."""
        given = (("max", self.max), ("min", self.min))
        return tuple((side, value) for side, value in given if value is not None)


@dataclass(frozen=True)
class Range:
    """What a metric can be at all."""

    low: float
    high: float

    def check(self, name: str, limit: Limit) -> None:
        """Refuse a limit that the metric cannot reach.

        Raises:
            ValueError: naming metric, side and range.
        """
        low, high = self.low, self.high
        for side, value in limit.sides:
            if not low <= value <= high:
                hint = f"; {value:g} % is {value / 100:g}" if 1 < value <= 100 == 100 * high else ""
                ends = f"from {low:g} to {high:g}" if high < float("inf") else f"at least {low:g}"
                raise ValueError(f"{name}.{side}: {value:g}, and the metric is {ends}{hint}")


AnyLimit = Annotated[Limit | None, Range(-math.inf, math.inf)]
RatioLimit = Annotated[Limit | None, Range(0.0, math.inf)]
"""Of a ratio, or of another metric that is 0 or more."""
ShareLimit = Annotated[Limit | None, Range(0.0, 1.0)]
DifferenceLimit = Annotated[Limit | None, Range(-1.0, 1.0)]
"""Of a difference of two shares."""


class Limits(Strict):
    """Limits on metrics: fields of the types above, which say what each metric can be."""

    @property
    def limits(self) -> dict[str, Limit]:
        """The limits that were given, by metric."""
        named = {name: getattr(self, name) for name in self._ranges()}
        return {name: limit for name, limit in named.items() if limit is not None}

    @classmethod
    def _ranges(cls) -> dict[str, Range]:
        return {
            name: found
            for name, field in cls.model_fields.items()
            for found in field.metadata
            if isinstance(found, Range)
        }

    @model_validator(mode="after")
    def _within_ranges(self) -> Self:
        ranges = self._ranges()
        for name, limit in self.limits.items():
            ranges[name].check(name, limit)
        return self
