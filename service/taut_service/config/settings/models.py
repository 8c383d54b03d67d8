"""Public models, their variants and the workers of each variant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from taut_service.config.settings.admission import AdmissionLimit, BrownOut
from taut_service.config.settings.discovery import Discovery
from taut_service.config.settings.fields import Count, Name, Scalar, Section, refuse_duplicates
from taut_service.config.settings.routing import Affinity

HTTP_DEFAULT_PORT = 80
DEFAULT_VARIANT = "default"
"""Name of the one variant of a model that lists ``workers`` itself."""
VariantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Provenance = dict[str, Scalar]
Weight = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
PerMillion = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class WorkerSettings(Section):
    """One vLLM server: a name for logs and metrics, and its plain-HTTP root.

    ``api_key_file`` holds the key that the server wants (vLLM's ``--api-key``).
    """

    name: Name
    url: str
    api_key_file: Annotated[Path | None, Field(strict=False)] = None

    @field_validator("url")
    @classmethod
    def _is_http_root(cls, url: str) -> str:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{url!r} has no usable port") from error
        if parts.scheme != "http" or not parts.hostname or port == 0:
            raise ValueError(f"{url!r} is not of the form http://host:port")
        if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
            raise ValueError(f"{url!r} must be the worker's root: http://host:port")
        return url

    @property
    def host(self) -> str:
        """Name or address to connect to."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """TCP port to connect to."""
        return urlsplit(self.url).port or HTTP_DEFAULT_PORT


Workers = Annotated[tuple[WorkerSettings, ...], Field(strict=False)]


class Golden(Section):
    """A prompt whose greedy first token is known: a worker's test before it gets traffic."""

    prompt: Annotated[str, Field(min_length=1)]
    expected_text: Annotated[str, Field(min_length=1)]


class Price(Section):
    """What a million tokens of a variant cost, in the operator's currency."""

    prompt_per_million: PerMillion = 0.0
    completion_per_million: PerMillion = 0.0


class VariantSettings(Section):
    """One precision of a model: a share of its traffic and the workers that serve it.

    ``served_name`` is what the workers call the model, the public name if not given. ``golden``
    and ``provenance`` replace the model's own.
    """

    name: VariantName
    weight: Weight = 1.0
    served_name: Name | None = None
    golden: Golden | None = None
    provenance: Provenance = Field(default_factory=dict)
    price: Price = Price()
    workers: Workers = ()
    discover: Discovery | None = None

    @model_validator(mode="after")
    def _has_workers(self) -> VariantSettings:
        if bool(self.workers) == (self.discover is not None):
            raise ValueError("give either 'workers' or 'discover'")
        return self


class ModelSettings(Section):
    """One public model: ``workers`` that serve it, or several ``variants`` of it.

    ``sticky`` is what keeps a caller or a session at its variant. ``admission`` replaces the
    common bound for this model. ``baseline`` is the variant that the guard compares others with.
    """

    name: Name
    aliases: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    max_model_len: Count
    golden: Golden | None = None
    provenance: Provenance = Field(default_factory=dict)
    affinity: Affinity = Affinity()
    sticky: Literal["none", "key", "session"] = "none"
    admission: AdmissionLimit | None = None
    brown_out: BrownOut | None = None
    baseline: VariantName | None = None
    workers: Workers = ()
    variants: Annotated[tuple[VariantSettings, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _has_variants(self) -> ModelSettings:
        if bool(self.workers) == bool(self.variants):
            raise ValueError("give either 'workers' or 'variants', with at least one entry")
        names = [variant.name for variant in self.every_variant()]
        refuse_duplicates("variant", names)
        if not any(variant.weight for variant in self.every_variant()):
            raise ValueError("the weights of 'variants' are all 0")
        if self.baseline is not None and (self.baseline not in names or len(names) == 1):
            raise ValueError(
                f"baseline names {self.baseline!r}: it must be one of several 'variants'"
            )
        if self.brown_out is not None:
            for name in (self.brown_out.source, self.brown_out.to):
                if name not in names:
                    raise ValueError(f"brown_out names the variant {name!r}, which is not listed")
            if self.brown_out.source == self.brown_out.to:
                raise ValueError("brown_out goes from a variant to itself")
        return self

    def every_variant(self) -> tuple[VariantSettings, ...]:
        """Return the variants, with ``golden``, ``provenance`` and ``served_name`` filled in."""
        listed = self.variants or (VariantSettings(name=DEFAULT_VARIANT, workers=self.workers),)
        return tuple(
            variant.model_copy(
                update={
                    "served_name": variant.served_name or self.name,
                    "golden": variant.golden or self.golden,
                    "provenance": variant.provenance or self.provenance,
                }
            )
            for variant in listed
        )

    def every_worker(self) -> tuple[WorkerSettings, ...]:
        """Return the listed workers of all variants."""
        return tuple(worker for variant in self.every_variant() for worker in variant.workers)
