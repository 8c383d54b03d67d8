"""The EndpointSlices of one Service, and the workers in them.

Source: Kubernetes, "EndpointSlices": a Service has several slices, one address family each; an
endpoint whose ``ready`` condition is absent counts as ready, one that is terminating is not
ready. Only the first address of an endpoint is used, as kube-proxy does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from taut_service.config.settings import WorkerSettings
from taut_service.worker.discovery.watch import worker_at

_FAMILIES = ("IPv4", "IPv6", "FQDN")


class SliceSet:
    """Keeps slices by name.

    Args:
        port: number, or name of a port of the Service.
    """

    def __init__(self, port: int | str) -> None:
        self._port = port
        self._slices: dict[str, dict[str, Any]] = {}

    def clear(self) -> None:
        """Forget every slice."""
        self._slices.clear()

    def put(self, item: dict[str, Any]) -> None:
        """Keep a slice, in place of an older one of its name.

        Raises:
            ValueError: it has no name.
        """
        self._slices[_name_of(item)] = item

    def drop(self, item: dict[str, Any]) -> None:
        """Forget a slice.

        Raises:
            ValueError: it has no name.
        """
        self._slices.pop(_name_of(item), None)

    def workers(self) -> list[WorkerSettings]:
        """Return the ready endpoints; a pod with addresses of two families counts once."""
        seen: set[str] = set()
        found = []
        ordered = sorted(self._slices.values(), key=_family_first)
        for item in ordered:
            for port in self._ports(item):
                for identity, address in _ready(item):
                    key = f"{identity}:{port}"
                    if key not in seen:
                        seen.add(key)
                        found.append(worker_at(address, port))
        return found

    def _ports(self, item: dict[str, Any]) -> list[int]:
        if isinstance(self._port, int):
            return [self._port]
        entries = item.get("ports") or []
        return [
            entry["port"]
            for entry in entries
            if isinstance(entry, dict)
            and entry.get("name") == self._port
            and isinstance(entry.get("port"), int)
        ]


def _ready(item: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (identity, address) of each ready endpoint; the identity is the pod's where known."""
    for endpoint in item.get("endpoints") or []:
        conditions = endpoint.get("conditions") or {}
        addresses = endpoint.get("addresses") or []
        if conditions.get("ready") is False or not addresses:
            continue
        target = endpoint.get("targetRef") or {}
        yield target.get("uid") or addresses[0], addresses[0]


def _family_first(item: dict[str, Any]) -> tuple[int, str]:
    family = item.get("addressType")
    rank = _FAMILIES.index(family) if family in _FAMILIES else len(_FAMILIES)
    return rank, _name_of(item)


def _name_of(item: dict[str, Any]) -> str:
    metadata = item.get("metadata") if isinstance(item, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str):
        raise ValueError("a slice has no name")
    return name
