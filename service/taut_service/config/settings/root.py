"""The whole file as one section."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from taut_service.config.settings.admission import AdmissionLimit
from taut_service.config.settings.cors import Cors
from taut_service.config.settings.fields import Section, refuse_duplicates
from taut_service.config.settings.guard import GuardSettings
from taut_service.config.settings.keys import ApiKey, refuse_equal_keys
from taut_service.config.settings.limits import Limits, RateLimits
from taut_service.config.settings.listen import AdminListen, Listen
from taut_service.config.settings.models import ModelSettings
from taut_service.config.settings.rollout import RolloutSettings
from taut_service.config.settings.routing import Routing, Timeouts
from taut_service.config.settings.telemetry import (
    AccessLogSettings,
    MetricsSettings,
    TracingSettings,
)


class Settings(Section):
    """The whole file. See ``docs/gateway-settings.md`` for the table of every key."""

    listen: Listen = Listen()
    admin: AdminListen | None = None
    cors: Cors | None = None
    models: Annotated[tuple[ModelSettings, ...], Field(min_length=1, strict=False)]
    admission: AdmissionLimit = AdmissionLimit()
    routing: Routing = Routing()
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    api_keys: Annotated[tuple[ApiKey, ...], Field(strict=False)] = ()
    api_keys_file: Annotated[Path | None, Field(strict=False)] = None
    rate_limits: RateLimits = RateLimits()
    drain_timeout_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 30.0
    access_log: AccessLogSettings = AccessLogSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracing: TracingSettings | None = None
    guard: GuardSettings | None = None
    rollout: RolloutSettings | None = None

    @model_validator(mode="after")
    def _names_are_unique(self) -> Settings:
        refuse_duplicates(
            "model", [n for model in self.models for n in (model.name, *model.aliases)]
        )
        refuse_duplicates("worker", [w.name for model in self.models for w in model.every_worker()])
        refuse_equal_keys(self.api_keys)
        return self

    @model_validator(mode="after")
    def _admin_is_guarded(self) -> Settings:
        guarded = bool(self.api_keys) or self.api_keys_file is not None
        if self.admin is not None and not guarded and not self.admin.is_loopback:
            raise ValueError(
                f"admin.host: {self.admin.host!r} is not a loopback address, and no API keys are "
                "configured"
            )
        return self

    @model_validator(mode="after")
    def _guard_has_a_baseline(self) -> Settings:
        if self.guard is not None and not any(model.baseline for model in self.models):
            raise ValueError("guard: no model names the 'baseline' its variants are compared with")
        if self.rollout is not None and (self.guard is None or self.admin is None):
            raise ValueError("rollout: needs the sections 'guard' and 'admin'")
        return self
