"""What the gateway tells about its requests: the access log and traces."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from taut_service.config.settings.fields import Name, Seconds, Section

Ratio = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class AccessLogSettings(Section):
    """One JSON line a request on standard output.

    ``ratio`` is the share of the answered requests that get a line, drawn by request id so that
    the lines of one request in several logs are kept or dropped together; refused, failed and
    abandoned requests always get one. ``access_log: false`` is short for ``enabled: false``.
    """

    enabled: bool = True
    ratio: Ratio = 1.0

    @model_validator(mode="before")
    @classmethod
    def _accept_a_switch(cls, value: Any) -> Any:
        return {"enabled": value} if isinstance(value, bool) else value


class MetricsSettings(Section):
    """How many series there may be.

    The first ``max_keys`` API keys that are used have metrics under their own names, the others
    share ``other``.
    """

    max_keys: Annotated[int, Field(ge=0, le=10_000)] = 100


class TracingSettings(Section):
    """OpenTelemetry spans, sent as OTLP over HTTP; needs the extra ``taut[otel]``.

    ``endpoint`` is the whole URL, such as ``http://collector:4318/v1/traces``. ``ratio`` is the
    share of new traces that are recorded; a client that sends ``traceparent`` decides for its own.
    """

    endpoint: str
    ratio: Ratio = 1.0
    service_name: Name = "taut-gateway"
    timeout_s: Seconds = 5.0

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not of the form http://host:4318/v1/traces")
        return url
