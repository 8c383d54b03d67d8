"""How the agreement of a variant with its baseline went over time, for the page and for scripts."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated

from fastapi import FastAPI, Query
from pydantic import BaseModel

from taut_service.errors import NotFoundError
from taut_service.guard.guard import Guard


class AgreementPoint(BaseModel):
    """Agreement of a variant with its baseline at one time; the true one is in ``low`` to ``high``.

    The intervals hold it at all times at once with probability 1 - alpha.
    """

    at: datetime
    mean: float
    low: float
    high: float


def require_watched(guard: Guard, model: str, variant: str) -> None:
    """Insist on a variant that the guard watches.

    Args:
        guard: that is asked.
        model: public name.
        variant: of it.

    Raises:
        NotFoundError: it is the baseline, or is not there.
    """
    if (model, variant) not in set(guard.pairs()):
        raise NotFoundError(
            f"the guard watches no variant {variant[:64]!r} of {model[:100]!r}",
            code="variant_not_found",
        )


def add_agreement(admin: FastAPI, guard: Guard) -> None:
    """Add the route.

    Args:
        admin: the application; its own dependency decides who may call.
        guard: has the series.
    """

    @admin.get("/admin/rollout/agreement", summary="How a variant's agreement went over time")
    async def show_agreement(
        model: Annotated[str, Query()], variant: Annotated[str, Query()]
    ) -> list[AgreementPoint]:
        require_watched(guard, model, variant)
        make = guard.course(model, variant).agreed(guard.settings.alpha)
        return [
            AgreementPoint(at=datetime.fromtimestamp(at, UTC), mean=mean, low=low, high=high)
            for at, mean, low, high in await asyncio.to_thread(make)
        ]
