"""A release of the chart in a namespace of a running control plane."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from chart_rendering import HELM, OWN_IMAGES, Document
from cluster_api import ClusterApi, eventually
from generate import CHART
from node_agents import NodeAgents

RESTRICTED = {
    f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn", "audit")
}
SECRETS = ("hub-token", "gateway-keys", "gateway-admin", "gateway-tls", "redis", "smoke-key")


@dataclass
class Plane:
    """A running control plane, its nodes, and how programs reach it."""

    api: ClusterApi
    agents: NodeAgents
    config: Path


@dataclass
class Release:
    """A namespace of its own, and helm in it; the release is called ``rel``."""

    plane: Plane
    namespace: str
    folder: Path

    def helm(
        self, verb: str, values: Document | None = None, *options: str, done: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run helm; unless ``done`` is false it must succeed."""
        env = {**os.environ, "KUBECONFIG": str(self.plane.config), "HOME": str(self.folder)}
        where = ["--namespace", self.namespace, "--timeout", "60s"]
        command = [str(HELM), verb, "rel", *where, *options]
        if values is not None:
            path = self.folder / f"{self.namespace}.json"
            path.write_text(json.dumps(values))
            command += [str(CHART), "--values", str(OWN_IMAGES), "--values", str(path)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=180, env=env)
        assert not done or result.returncode == 0, result.stderr
        return result

    def deployment(self, name: str) -> Document:
        """A Deployment of the release, by the end of its name."""
        return self.plane.api.get("apps/v1", "Deployment", self.namespace, f"rel-taut-{name}")

    def pods(self, component: str) -> list[Document]:
        """Pods of a component that are not on their way out."""
        return [
            pod
            for pod in self.plane.api.list("v1", "Pod", self.namespace)
            if pod["metadata"]["labels"].get("app.kubernetes.io/component") == component
            and "deletionTimestamp" not in pod["metadata"]
        ]

    def ready(self, name: str) -> int:
        """How many pods of a Deployment are ready, of its newest template alone."""
        status = self.deployment(name).get("status", {})
        return min(int(status.get(key, 0)) for key in ("readyReplicas", "updatedReplicas"))

    def waits_for(self, name: str, count: int) -> None:
        """Wait until a Deployment has so many ready pods."""
        assert eventually(lambda: self.ready(name) == count), self.why_not()

    def scale(self, name: str, count: int, manager: str = "kubectl") -> None:
        """What ``kubectl scale`` sends."""
        api = self.plane.api
        where = api.path("apps/v1", "Deployment", self.namespace, f"rel-taut-{name}")
        api.patch(f"{where}/scale", {"spec": {"replicas": count}}, manager)

    def why_not(self) -> list[Any]:
        """Warnings of the namespace, for whoever reads a failed test."""
        events = self.plane.api.list("v1", "Event", self.namespace)
        found = [
            (each["involvedObject"]["name"], each["reason"], each["message"])
            for each in events
            if each["type"] == "Warning"
        ]
        return sorted(set(found))


@contextmanager
def release(plane: Plane, folder: Path) -> Iterator[Release]:
    """Make a namespace with what values may name; delete it with all that is in it."""
    namespace = f"ns-{uuid.uuid4().hex[:8]}"
    metadata = {"name": namespace, "labels": RESTRICTED}
    api = plane.api
    api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}, None)
    accounts = partial(api.list, "v1", "ServiceAccount", namespace)
    assert eventually(accounts), "the controller manager makes no service account"
    for name in SECRETS:
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
        api.apply(secret, namespace)
    try:
        yield Release(plane, namespace, folder)
    finally:
        api.delete(api.path("v1", "Namespace", None, namespace))
        assert eventually(lambda: not api.list("v1", "Pod", namespace)), "its pods stay"
