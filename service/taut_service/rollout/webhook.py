"""Tells somebody of every change: the line of the log, as a JSON POST."""

from __future__ import annotations

import asyncio
import http.client
import urllib.error
import urllib.request
from typing import Any

from taut_service.rollout.audit import Entry
from taut_service.rollout.outbox import DeliveryError, Outbox

TIMEOUT_S = 5.0


def webhook(url: str) -> Outbox[Entry]:
    """Return what posts the lines of the log.

    Args:
        url: where to; may hold a secret, and no log shows it.
    """

    async def deliver(entry: Entry) -> None:
        try:
            await asyncio.to_thread(_post, url, entry.line.encode())
        except (OSError, ValueError, http.client.HTTPException) as error:
            # Only what went wrong is written down, not the address.
            reason = getattr(error, "reason", None) or getattr(error, "code", None) or error
            raise DeliveryError(str(reason)) from error

    return Outbox("the webhook", deliver)


class _NowhereElse(urllib.request.HTTPRedirectHandler):
    """Follows nothing: a POST that is sent elsewhere becomes a GET, without what it told."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(  # noqa: S310 - http or https: the settings see to it
        url, body, {"content-type": "application/json"}, method="POST"
    )
    opener = urllib.request.build_opener(_NowhereElse)
    with opener.open(request, timeout=TIMEOUT_S) as answer:
        answer.read(1024)
