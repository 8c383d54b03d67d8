"""What every section of a policy is made of: strict models, numbers, and limits."""

from typing import Annotated

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


def check_ranges(
    limits: dict[str, Limit], ranges: dict[str, tuple[float, float]]
) -> dict[str, Limit]:
    """Refuse a limit that its metric cannot reach.

    Args:
        limits: by metric.
        ranges: what each metric can be at all.

    Raises:
        ValueError: naming metric, side and range.
    """
    for name, limit in limits.items():
        low, high = ranges[name]
        for side, value in limit.sides:
            if not low <= value <= high:
                hint = f"; {value:g} % is {value / 100:g}" if 1 < value <= 100 == 100 * high else ""
                ends = f"from {low:g} to {high:g}" if high < float("inf") else f"at least {low:g}"
                raise ValueError(f"{name}.{side}: {value:g}, and the metric is {ends}{hint}")
    return limits
