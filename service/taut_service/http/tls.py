"""TLS on the listener, with a certificate that may be renewed while the gateway runs.

Invariant: a connection is answered with a certificate and a key that belong together. New files
are read into a new context; only a context that was made without an error replaces the one in
use, so a renewal that is caught half-way, or is wrong, changes nothing but the log. Connections
that are open keep what they began with.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path

from taut_service.config.settings import SettingsError, TlsFiles

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 5.0
"""Pause between two looks at the files; cert-manager and Kubernetes secrets replace them whole."""


class TlsError(SettingsError):
    """The certificate or its key cannot be used; ``str()`` is one line."""


class ServerTls:
    """The listener's certificate. ``context`` goes to the server and stays the same object.

    Args:
        files: certificate chain and key.
        on_reload: told whether a change of the files could be used; for a metric.

    Raises:
        TlsError: the files cannot be used.
    """

    def __init__(self, files: TlsFiles, on_reload: Callable[[bool], None] = lambda _: None) -> None:
        self._files = files
        self._on_reload = on_reload
        self._seen = _stamp(files)
        self.context = _load(files)
        self._current = self.context
        # Called for every handshake, with or without a server name: the documented place to
        # replace the context of a connection.
        self.context.sni_callback = self._use_current

    def _use_current(
        self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _: ssl.SSLContext
    ) -> None:
        connection.context = self._current

    def check(self) -> bool:
        """Load the files again if they changed.

        Returns:
            Whether a new certificate is in use.
        """
        now = _stamp(self._files)
        if now == self._seen:
            return False
        self._seen = now
        try:
            self._current = _load(self._files)
        except TlsError as error:
            logger.error("the certificate was not renewed: %s", error)
            self._on_reload(False)
            return False
        logger.info("using the new certificate in %s", self._files.certificate)
        self._on_reload(True)
        return True

    async def run(self) -> None:
        """Check for ever; ends by cancellation. Reading a few files stays off the event loop."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            await asyncio.to_thread(self.check)


def _load(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for name, path in (("certificate", files.certificate), ("key", files.key)):
        if not path.is_file():
            raise TlsError(f"listen.tls.{name}: {path} is not a file")
    try:
        # An empty password, so that an encrypted key is an error and not a question on a terminal.
        context.load_cert_chain(files.certificate, files.key, password="")
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise TlsError(
            f"listen.tls: {files.certificate} and {files.key} are not a PEM certificate chain and "
            f"its key ({reason})"
        ) from error
    return context


def _stamp(files: TlsFiles) -> tuple[tuple[int, int, int], ...]:
    """Return what changes when a file is replaced, through links too."""
    return tuple(_stamp_of(path) for path in (files.certificate, files.key))


def _stamp_of(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0)
    return (status.st_ino, status.st_mtime_ns, status.st_size)
