"""Pods of the rendered chart as the model of the scheduler takes them, phase by phase."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Document = dict[str, Any]
PREPARED = "config.json"
"""A waiting container polls for this file; a finished compression makes it."""


@dataclass(frozen=True)
class Pod:
    """A pod as the scheduler sees it."""

    name: str
    template: Document = field(hash=False, compare=False)
    is_job: bool

    @property
    def spec(self) -> Document:
        """Its spec."""
        spec: Document = self.template["spec"]
        return spec

    @property
    def labels(self) -> dict[str, str]:
        """Its labels."""
        labels: dict[str, str] = self.template["metadata"]["labels"]
        return labels

    def claims(self) -> list[str]:
        """Claims that it mounts."""
        volumes = self.spec.get("volumes", [])
        found = [
            v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v
        ]
        return sorted(found)

    def wants(self) -> dict[str, int]:
        """Counted resources: of init containers the most, of containers the sum."""
        total: dict[str, int] = {}
        for container in self.spec["containers"]:
            for key, count in _counted(container).items():
                total[key] = total.get(key, 0) + count
        for container in self.spec.get("initContainers", []):
            for key, count in _counted(container).items():
                total[key] = max(total.get(key, 0), count)
        return total

    def makes(self) -> set[str]:
        """Checkpoints that its steps leave in the store."""
        made = set()
        for container in self.spec.get("initContainers", []):
            args = container.get("args", [])
            if args[:1] == ["compress"]:
                made.add(args[args.index("--output") + 1])
        return made

    def needs(self) -> set[str]:
        """Checkpoints without which it does not come up (its own steps make some of them)."""
        needed = set()
        for container in self.spec.get("initContainers", []):
            for argument in container.get("args", []):
                if argument.endswith(f"/{PREPARED}"):
                    needed.add(argument.removesuffix(f"/{PREPARED}"))
        for container in self.spec["containers"]:
            args = container.get("args", [])
            if args[:1] == ["worker"] and args[1].startswith("/models/checkpoints"):
                needed.add(args[1])
        return needed - self.makes()


def _counted(container: Document) -> dict[str, int]:
    limits = container.get("resources", {}).get("limits", {})
    return {key: int(count) for key, count in limits.items() if "/" in key}


def phases(rendered: list[Document]) -> list[list[Pod]]:
    """Pods that exist together: Jobs of hooks one after the other by weight, then all the rest.

    A Job of a wave of Argo CD before the others comes before them, too.
    """
    early: list[tuple[int, str, list[Pod]]] = []
    late: list[Pod] = []
    for document in rendered:
        notes = document["metadata"].get("annotations", {})
        hooks = notes.get("helm.sh/hook", "")
        pods = list(_pods(document))
        if "pre-install" in hooks or int(notes.get("argocd.argoproj.io/sync-wave", 0)) < 0:
            weight = int(notes.get("helm.sh/hook-weight", 0))
            early.append((weight, document["metadata"]["name"], pods))
        elif not hooks:
            late += pods
    return [pods for _, _, pods in sorted(early, key=lambda each: each[:2]) if pods] + [late]


def afterwards(rendered: list[Document]) -> list[list[Pod]]:
    """Jobs of hooks that run after an upgrade or as tests, one after the other, beside workers."""
    hooks = [
        d
        for d in rendered
        if "test" in d["metadata"].get("annotations", {}).get("helm.sh/hook", "")
    ]
    return [list(_pods(document)) for document in hooks]


def _pods(document: Document) -> Iterator[Pod]:
    name = document["metadata"]["name"]
    spec = document.get("spec", {})
    if document["kind"] == "Job":
        yield Pod(name, spec["template"], is_job=True)
    elif document["kind"] == "Deployment" and not name.endswith("-gateway"):
        # Gateways want nothing that anybody else waits for.
        for number in range(spec.get("replicas", 1)):
            yield Pod(f"{name}-{number}", spec["template"], is_job=False)
