"""How a candidate takes over a model's traffic step by step, and where that is written down."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from taut_service.config.settings.discovery import DnsLabel, KubernetesApi
from taut_service.config.settings.fields import Count, Fraction, Seconds, Section
from taut_service.config.settings.limits import RedisServer

Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Ratio = Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)]
LONGEST_PAUSE_S = 30
"""Between two decisions: a step whose looks are rarer would count as not watched."""
_PRINTABLE = re.compile(r"[\x21-\x7e]+")


class RolloutRedis(RedisServer):
    """A Redis that several gateways share; may be that of the rate limits."""

    key_prefix: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,64}$")] = "taut:rollout:"
    timeout_s: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] = 2.0


class KubernetesEvents(KubernetesApi):
    """A Kubernetes Event for every change of a rollout, about the gateway's own ``deployment``.

    The service account needs a role that may get that Deployment and create ``events`` of
    ``events.k8s.io`` in the namespace.
    """

    deployment: DnsLabel


class RolloutSettings(Section):
    """The steps of a rollout, what each needs, and its memory.

    ``steps`` are the candidate's shares in percent; 0 is the shadow. A step lasts ``min_step_s``
    at least and needs ``min_answers`` compared answers with ``min_tokens`` tokens of its own.
    Clients' streams are compared as well: ``max_first_token_ratio`` and
    ``max_inter_token_ratio`` bound the candidate's medians over the baseline's, which must be
    proven to be below, from ``min_streams`` streams of each on. ``store: file`` keeps everything
    in ``directory``; ``store: redis`` shares it between gateways.
    """

    steps: Annotated[tuple[Percent, ...], Field(min_length=1, strict=False)] = (0, 1, 10, 50, 100)
    min_step_s: Seconds = 600.0
    min_answers: Count = 50
    min_tokens: Count = 2000
    max_error_rate: Fraction = 0.02
    max_first_token_ratio: Ratio = 1.5
    max_inter_token_ratio: Ratio = 1.5
    min_streams: Annotated[int, Field(ge=2, le=10_000)] = 20
    cooldown_s: Seconds = 3600.0
    every_s: Annotated[float, Field(gt=0, le=LONGEST_PAUSE_S, allow_inf_nan=False)] = 1.0
    webhook: str | None = None
    events: KubernetesEvents | None = None
    store: Literal["file", "redis"] = "file"
    directory: Annotated[Path | None, Field(strict=False)] = None
    redis: RolloutRedis | None = None

    @field_validator("webhook")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is not None and not _can_be_posted_to(url):
            # What it says may hold a secret: it is not shown.
            raise ValueError("must be of the form https://host/path")
        return url

    @model_validator(mode="after")
    def _climbs(self) -> RolloutSettings:
        if any(a >= b for a, b in zip(self.steps, self.steps[1:], strict=False)):
            raise ValueError("'steps' must climb, such as [0, 1, 10, 50, 100]")
        if self.steps[-1] != 100:
            raise ValueError("the last of 'steps' must be 100")
        if len(self.steps) == 1:
            raise ValueError(
                "the first of 'steps' comes before all evidence: give one below 100, such as 0"
            )
        return self

    @model_validator(mode="after")
    def _has_what_the_store_needs(self) -> RolloutSettings:
        if (self.store == "file") != (self.directory is not None):
            raise ValueError("'directory' is needed with 'store: file', and only then")
        if (self.store == "redis") != (self.redis is not None):
            raise ValueError("'redis' is needed with 'store: redis', and only then")
        return self


def _can_be_posted_to(url: str) -> bool:
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return named and parts.scheme in ("http", "https") and _PRINTABLE.fullmatch(url) is not None
