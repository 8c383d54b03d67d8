"""Workers from Kubernetes: the ready endpoints of a Service, listed once and then watched.

Protocol (Kubernetes API concepts, "Efficient detection of changes"): a list gives the state and a
``resourceVersion``; a watch from there gives one JSON object a line, with bookmarks that move the
version while nothing changes. A watch ends by itself after a while and goes on from the last
version; ``410 Gone`` means that the version is too old, so list again. Every other failure is
tried again after a growing pause, and the last known set stays meanwhile.

A client library would bring an event loop's worth of generated models for two GET requests, so
the gateway's own connection (:mod:`taut_service.worker.connection`) carries them, over TLS.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from taut_service.config.settings import KubernetesDiscovery
from taut_service.kubernetes.api_server import ApiServer, ApiStatusError
from taut_service.worker.discovery.endpoint_slices import SliceSet
from taut_service.worker.discovery.watch import Apply, DiscoveryState
from taut_service.worker.upstream_errors import UpstreamError

GONE = 410
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
PAGE = 500
"""Slices a page of a list; a slice has up to 100 endpoints."""


class _GoneError(Exception):
    """The version to watch from is no longer known: list again."""


class EndpointWatch:
    """Follows the EndpointSlices of one Service.

    Args:
        settings: which Service, and where the API server is.
        apply: told of every new set of workers.
        first_backoff_s: pause after the first failure; doubled with each further one.
    """

    def __init__(
        self,
        settings: KubernetesDiscovery,
        apply: Apply,
        first_backoff_s: float = FIRST_BACKOFF_S,
    ) -> None:
        self._settings = settings
        self.server = ApiServer(settings)
        self._slices = SliceSet(settings.port)
        self._version = ""
        self._first_backoff_s = first_backoff_s
        self._failures_in_a_row = 0
        self.state = DiscoveryState(f"kubernetes {settings.namespace}/{settings.service}", apply)

    async def run(self) -> None:
        """List and watch for ever; ends by cancellation."""
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except _GoneError:
                self._version = ""
                await self._breathe()
            except (UpstreamError, OSError) as error:
                # OSError: no token or certificate file. The version is still good: whatever was
                # read before has been handed over.
                self.state.failed(str(error) or type(error).__name__)
                await self._pause()
            except (ApiStatusError, ValueError) as error:
                # ValueError: an answer that is not ours, perhaps in the middle of several events.
                self._version = ""
                self.state.failed(str(error) or type(error).__name__)
                await self._pause()

    async def _breathe(self) -> None:
        """Keep a server that ends every watch at once from being asked without a pause."""
        await asyncio.sleep(random.uniform(0, self._first_backoff_s))  # noqa: S311 - not for secrets

    async def _pause(self) -> None:
        longest = min(MAX_BACKOFF_S, self._first_backoff_s * 2**self._failures_in_a_row)
        self._failures_in_a_row = min(self._failures_in_a_row + 1, 16)
        # Full jitter: many gateways that lost one API server must not come back in step.
        await asyncio.sleep(random.uniform(longest / 2, longest))  # noqa: S311 - not for secrets

    @property
    def _path(self) -> str:
        # Both names are checked by the settings to be DNS labels: nothing to escape.
        settings = self._settings
        return (
            f"/apis/discovery.k8s.io/v1/namespaces/{settings.namespace}/endpointslices"
            f"?labelSelector=kubernetes.io%2Fservice-name%3D{settings.service}"
        )

    async def _list(self) -> None:
        self._slices.clear()
        token = ""
        while True:
            page = f"{self._path}&limit={PAGE}" + (f"&continue={token}" if token else "")
            document = await self.server.get(page)
            for item in _list_of(document, "items"):
                self._slices.put(item)
            metadata = _mapping_of(document, "metadata")
            token = str(metadata.get("continue") or "")
            if not token:
                break
        self._version = str(metadata.get("resourceVersion") or "")
        if not self._version:
            raise ValueError("the list has no resourceVersion")
        self._worked()

    async def _watch(self) -> None:
        path = (
            f"{self._path}&watch=true&allowWatchBookmarks=true"
            f"&timeoutSeconds={self.server.watch_s}&resourceVersion={self._version}"
        )
        try:
            async for lines in self.server.lines(path):
                for line in lines:
                    self._take(json.loads(line))
                self._worked()
            await self._breathe()
        except ApiStatusError as error:
            if error.status == GONE:
                raise _GoneError from error
            raise

    def _take(self, event: Any) -> None:
        if not isinstance(event, dict):
            raise ValueError("a watch event is not an object")
        item = _mapping_of(event, "object")
        match event.get("type"):
            case "ADDED" | "MODIFIED":
                self._slices.put(item)
            case "DELETED":
                self._slices.drop(item)
            case "BOOKMARK":
                pass
            case "ERROR":
                if item.get("code") == GONE:
                    raise _GoneError
                raise ApiStatusError(int(item.get("code") or 0), str(item.get("reason")))
            case other:
                raise ValueError(f"unknown watch event {other!r}")
        version = _mapping_of(item, "metadata").get("resourceVersion")
        if version:
            self._version = str(version)

    def _worked(self) -> None:
        self._failures_in_a_row = 0
        self.state.found(self._slices.workers())


def _mapping_of(document: Any, key: str) -> dict[str, Any]:
    value = document.get(key) if isinstance(document, dict) else None
    if not isinstance(value, dict):
        raise ValueError(f"the answer has no object {key!r}")
    return value


def _list_of(document: Any, key: str) -> list[Any]:
    value = document.get(key) if isinstance(document, dict) else None
    # Go writes an empty list as null.
    return value if isinstance(value, list) else []
