"""Writes every change as a Kubernetes Event about the gateway's own Deployment.

``kubectl describe deployment`` and ``kubectl events`` then show a rollout beside what the cluster
did. The name of an Event comes from its line's hash: written twice it is still one.
"""

from __future__ import annotations

import socket
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from taut_service.config.settings import KubernetesEvents
from taut_service.kubernetes.api_server import ApiServer, ApiStatusError
from taut_service.rollout.audit import Entry
from taut_service.rollout.outbox import DeliveryError, Outbox
from taut_service.worker.upstream_errors import UpstreamError

CONTROLLER = "taut-gateway"
MAX_NOTE = 1024
"""Bytes of a note that the API server takes."""
REASONS = {
    "started": "RolloutStarted",
    "resumed": "RolloutResumed",
    "promoted": "RolloutPromoted",
    "completed": "RolloutCompleted",
    "held": "RolloutHeld",
    "rolled_back": "RolloutRolledBack",
    "manual": "RolloutOverridden",
}
"""What happened → the word that people filter by."""


def kubernetes_events(settings: KubernetesEvents) -> Outbox[Entry]:
    """Return what writes the Events.

    Args:
        settings: where, and about which Deployment.
    """
    server = ApiServer(settings)
    known: list[dict[str, Any]] = []

    async def deliver(entry: Entry) -> None:
        try:
            if not known:
                known.append(await _deployment(server, settings))
            path = f"/apis/events.k8s.io/v1/namespaces/{settings.namespace}/events"
            await server.create(path, event_of(entry, known[0], socket.gethostname()))
        except ApiStatusError as error:
            if error.status != HTTPStatus.CONFLICT:  # it was written, and the answer lost
                raise DeliveryError(_told(error, settings)) from error
        except (UpstreamError, OSError, ValueError) as error:
            raise DeliveryError(str(error) or type(error).__name__) from error

    return Outbox("Kubernetes", deliver)


async def _deployment(server: ApiServer, settings: KubernetesEvents) -> dict[str, Any]:
    """Return what an Event says of the object that it is about; ``kubectl`` looks for its uid."""
    place = f"/apis/apps/v1/namespaces/{settings.namespace}/deployments/{settings.deployment}"
    found = await server.get(place)
    metadata = found.get("metadata") if isinstance(found, dict) else None
    if not isinstance(metadata, dict) or not metadata.get("uid"):
        raise ValueError(f"the Deployment {settings.deployment} has no uid")
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "namespace": settings.namespace,
        "name": settings.deployment,
        "uid": metadata["uid"],
    }


def event_of(entry: Entry, regarding: dict[str, Any], instance: str) -> dict[str, Any]:
    """Return the Event of a line of the log.

    Args:
        entry: the line.
        regarding: the object that it is about.
        instance: which gateway writes it.
    """
    state = entry.state
    at = datetime.fromtimestamp(state.since, UTC).isoformat(timespec="microseconds")
    note = f"{state.model}: {state.candidate} {state.phase} at {state.percent:g} %: {state.why}"
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {
            "name": f"{regarding['name']}.{entry.hash[:16]}",
            "namespace": regarding["namespace"],
        },
        "eventTime": at.replace("+00:00", "Z"),
        "type": "Warning" if entry.event == "rolled_back" else "Normal",
        "reason": REASONS[entry.event],
        "action": "Rollout",
        "note": note.encode()[:MAX_NOTE].decode(errors="ignore"),
        "regarding": regarding,
        "reportingController": CONTROLLER,
        "reportingInstance": instance[:128],
    }


def _told(error: ApiStatusError, settings: KubernetesEvents) -> str:
    if error.status in (HTTPStatus.FORBIDDEN, HTTPStatus.UNAUTHORIZED):
        return (
            f"{error}: its account needs 'get' on the Deployment {settings.deployment} and "
            "'create' on events of events.k8s.io"
        )
    return str(error)
