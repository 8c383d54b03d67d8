"""Where the workers of a variant come from when they are not listed in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from taut_service.config.settings.fields import Port, Seconds, Section

DnsLabel = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet puts a pod's token."""


class DnsDiscovery(Section):
    """Every address of a name is a worker: a headless Service, or any round-robin record."""

    host: Annotated[str, Field(min_length=1)]
    port: Port
    every_s: Seconds = 5.0


class KubernetesApi(Section):
    """How the Kubernetes API is reached, and in which namespace it is asked."""

    namespace: DnsLabel
    api_server: str = "https://kubernetes.default.svc"
    service_account: Annotated[Path, Field(strict=False)] = SERVICE_ACCOUNT

    @field_validator("api_server")
    @classmethod
    def _is_https_root(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme != "https" or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ValueError(f"{url!r} is not of the form https://host:port")
        return url


class KubernetesDiscovery(KubernetesApi):
    """Every ready endpoint of a Service is a worker. ``port`` is a number or a port's name.

    ``service_account`` is the folder with ``token`` and ``ca.crt``; it needs a role that may list
    and watch ``endpointslices`` of the namespace.
    """

    service: DnsLabel
    port: Port | Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?$")]


class Discovery(Section):
    """Exactly one of its keys is given."""

    dns: DnsDiscovery | None = None
    kubernetes: KubernetesDiscovery | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Discovery:
        if (self.dns is None) == (self.kubernetes is None):
            raise ValueError("give either 'dns' or 'kubernetes'")
        return self
