"""Names of Services as a cluster resolves them, in as much as groups of nodes need it: a model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]


@dataclass(frozen=True)
class Names:
    """Which names of a namespace resolve to which pods, as kube-dns and LeaderWorkerSet do it."""

    services: dict[str, Document]

    @classmethod
    def of(cls, rendered: list[Document]) -> Names:
        """Services of the chart, and the headless one that LeaderWorkerSet makes for a group.

        LeaderWorkerSet makes a Service of its own name, which publishes addresses of pods that
        are not ready; where one of that name exists it makes none.
        """
        services = {d["metadata"]["name"]: d["spec"] for d in rendered if d["kind"] == "Service"}
        for document in rendered:
            if document["kind"] == "LeaderWorkerSet":
                selector = {"leaderworkerset.sigs.k8s.io/name": document["metadata"]["name"]}
                made = {"selector": selector, "publishNotReadyAddresses": True, "clusterIP": "None"}
                services.setdefault(document["metadata"]["name"], made)
        return cls(services)

    def unready_leader_resolves(self, group: Document) -> bool:
        """Whether followers find the first rank while it waits for them, so is not ready."""
        name = group["metadata"]["name"]
        service = self.services[name]
        template = group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
        labels = {**template["metadata"]["labels"], "leaderworkerset.sigs.k8s.io/name": name}
        selects = service["selector"].items() <= labels.items()
        return selects and bool(service.get("publishNotReadyAddresses"))


def is_dns_label(name: str) -> bool:
    """Whether a Service may have this name."""
    return re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name) is not None
