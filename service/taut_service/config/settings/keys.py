"""Who may call, what they may do, and how much of it."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import Field, field_validator

from taut_service.config.settings.fields import Count, Name, Section, refuse_duplicates

INFERENCE = "inference"
"""Scope: may call every model."""
MODEL_PREFIX = "models:"
"""Scope ``models:NAME``: may call this model, and others only by further such scopes."""
PIN_VARIANT = "variant:pin"
"""Scope: may choose the variant with ``X-Taut-Variant``."""
HIGH_PRIORITY = "priority:high"
"""Scope: may ask for a higher priority than the key's own with ``X-Taut-Priority``."""
ADMIN = "admin"
"""Scope: may use the admin API."""
_SCOPE = re.compile(
    rf"{INFERENCE}|{MODEL_PREFIX}[\x21-\x7e]+|{PIN_VARIANT}|{HIGH_PRIORITY}|{ADMIN}"
)


class PriorityName(StrEnum):
    """Classes of requests, the first served first."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class ApiKey(Section):
    """A caller and the SHA-256 of the key it sends, 64 hexadecimal digits.

    ``weight`` is its share of a full gateway against callers of its priority. A limit that is not
    given is no limit. ``brown_out`` allows its requests to be answered by a model's smaller variant
    under pressure. ``max_inflight`` bounds its
    requests under way at a time in one gateway, those that wait included.
    """

    name: Name
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]
    scopes: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = (INFERENCE,)
    priority: Annotated[PriorityName, Field(strict=False)] = PriorityName.NORMAL
    weight: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] = 1.0
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_inflight: Count | None = None
    brown_out: bool = False

    @field_validator("scopes")
    @classmethod
    def _are_known(cls, scopes: tuple[str, ...]) -> tuple[str, ...]:
        for scope in scopes:
            if _SCOPE.fullmatch(scope) is None:
                raise ValueError(
                    f"{scope!r} is not a scope: use {INFERENCE}, {MODEL_PREFIX}NAME, {PIN_VARIANT},"
                    f" {HIGH_PRIORITY} or {ADMIN}"
                )
        if INFERENCE in scopes and any(scope.startswith(MODEL_PREFIX) for scope in scopes):
            raise ValueError(f"{INFERENCE!r} covers every model: drop it or '{MODEL_PREFIX}…'")
        return scopes


def refuse_equal_keys(keys: tuple[ApiKey, ...]) -> None:
    """Insist that names and keys differ.

    Args:
        keys: all of them.

    Raises:
        ValueError: two share a name or a hash.
    """
    refuse_duplicates("API key", [key.name for key in keys])
    owner: dict[str, str] = {}
    for key in keys:
        other = owner.setdefault(key.sha256.lower(), key.name)
        if other != key.name:
            raise ValueError(f"the API keys {other!r} and {key.name!r} are the same key")
