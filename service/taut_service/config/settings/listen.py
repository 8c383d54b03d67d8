"""Where the gateway listens: the public address and the administrator's."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from taut_service.config.settings.fields import PortOrAny, Section


class TlsFiles(Section):
    """A certificate chain and its private key, PEM."""

    certificate: Annotated[Path, Field(strict=False)]
    key: Annotated[Path, Field(strict=False)]


class Listen(Section):
    """Where the gateway listens. Port 0 takes any free port."""

    host: str = "127.0.0.1"
    port: PortOrAny = 8000
    tls: TlsFiles | None = None


class AdminListen(Section):
    """Where the admin API listens; never the public address.

    An address that others can reach needs API keys, one of them with the scope ``admin``.
    """

    host: str = "127.0.0.1"
    port: PortOrAny = 8001

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
