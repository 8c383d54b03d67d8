"""How much is under way at a time, and when a smaller variant helps out."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from taut_service.config.settings.fields import Count, Fraction, Name, Seconds, Section


class AdmissionLimit(Section):
    """How many requests of a model may be under way, how many may wait, and for how long.

    ``max_inflight_tokens`` bounds prompt and completion tokens together, as estimated from the
    request; None sets no bound. A request that has waited ``aging_s`` counts as one priority
    higher, and so on.
    """

    max_inflight: Count = 64
    max_inflight_tokens: Count | None = None
    max_queued: Annotated[int, Field(ge=0)] = 256
    queue_timeout_s: Seconds = 30.0
    aging_s: Seconds = 5.0


class BrownOut(Section):
    """From which queue length on requests of one variant go to a smaller one.

    Both fractions are shares of ``max_queued``: it begins at ``at_queue_fraction`` and ends at
    ``until_queue_fraction``, so that it does not flicker.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    source: Annotated[Name, Field(alias="from")]
    to: Name
    at_queue_fraction: Fraction = 0.5
    until_queue_fraction: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.1

    @model_validator(mode="after")
    def _ends_below_its_beginning(self) -> BrownOut:
        if self.until_queue_fraction >= self.at_queue_fraction:
            raise ValueError("until_queue_fraction must be smaller than at_queue_fraction")
        return self
