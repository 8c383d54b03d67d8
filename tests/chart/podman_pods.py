"""Pods of the rendered chart, run by ``podman play kube``: a cluster's part for one node.

Podman 4.3 takes Pods, Deployments and ConfigMaps. What it does not know is put in here, and
nothing else:

* a Job is played as the Pod of its template;
* claims and emptyDirs become directories of this machine, the latter with the kubelet's mode;
* ConfigMaps get names of this network, since podman makes volumes of that name of them;
* the pod's address, which podman 4.3 cannot put into a variable, is chosen beforehand, and put
  into arguments that name it, since podman leaves ``$(POD_IP)`` as it is;
* annotations are left out (podman 4.3 refuses values of more than 63 characters);
* published ports are left out: pods are asked at their own addresses, as in a cluster;
* Services are names of pods in the network's DNS, so that their port must be the pods' own.

Probes do not run by themselves (no systemd): tests run their commands. Nothing schedules, evicts
or restarts, and network policies, accounts and disruption budgets have no meaning.
"""

from __future__ import annotations

import copy
import ipaddress
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from chart_rendering import Document, every_container
from container_engine import Engine

FIRST_ADDRESS = 10
"""Host numbers below are podman's."""


@dataclass
class Node:
    """A network with pods on it.

    Args:
        engine: podman.
        folder: for documents.
        name: of the network, and the beginning of every volume's name.
        subnet: the network's addresses.
        claims: claim's name → directory on this machine.
        config_maps: documents that pods may mount.
    """

    engine: Engine
    folder: Path
    name: str
    subnet: ipaddress.IPv4Network
    claims: dict[str, Path] = field(default_factory=dict)
    config_maps: list[Document] = field(default_factory=list)
    pods: list[str] = field(default_factory=list)

    def play(self, document: Document, name: str, aliases: tuple[str, ...] = ()) -> Pod:
        """Play a Deployment or Job under another name.

        Args:
            document: as rendered.
            name: of the pod, unique in the network.
            aliases: names of Services that this pod stands behind.

        Returns:
            The pod; of a Job, after its init containers, one of which may have failed.
        """
        address = str(self.subnet[FIRST_ADDRESS + len(self.pods)])
        played = self._as_pod(document, f"{self.name}-{name}", address)
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump_all([*self._own_maps(), played]))
        options = ",".join([f"ip={address}", *(f"alias={alias}" for alias in aliases)])
        self.pods.append(played["metadata"]["name"])
        arguments = ("play", "kube", "--network", f"{self.name}:{options}", path)
        done = self.engine.podman(*arguments, timeout_s=600, check=False)
        # An init container of a Job may fail: that is a result.
        assert done.returncode == 0 or document["kind"] == "Job", done.stderr
        return Pod(self.engine, played["metadata"]["name"], address, done.stderr)

    def _own_maps(self) -> list[Document]:
        """ConfigMaps under names of this network: podman makes volumes of them, too."""
        own = copy.deepcopy(self.config_maps)
        for document in own:
            document["metadata"] = {"name": f"{self.name}-{document['metadata']['name']}"}
        return own

    def _as_pod(self, document: Document, name: str, address: str) -> Document:
        template = copy.deepcopy(document["spec"]["template"])
        for volume in template["spec"].get("volumes", []):
            self._place(volume, name)
        for container in every_container(template):
            _localise(container, address)
        if document["kind"] == "Deployment":
            template["spec"]["restartPolicy"] = "Always"
        metadata = {"labels": template["metadata"]["labels"], "name": name}
        # Kept when they have ended: podman 4.3 removes them too early ("cannot remove … running").
        metadata["annotations"] = {"io.podman.annotations.init.container.type": "always"}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}

    def _place(self, volume: Document, pod: str) -> None:
        """Say where on this machine a volume lies."""
        if config_map := volume.get("configMap"):
            config_map["name"] = f"{self.name}-{config_map['name']}"
            return
        if volume.pop("emptyDir", None) is not None:
            folder = self._empty(f"{pod}-{volume['name']}")
        else:
            folder = self.claims[volume.pop("persistentVolumeClaim")["claimName"]]
        # A named volume would get the owner and mode of what the image has in its place.
        volume["hostPath"] = {"path": str(folder), "type": "Directory"}

    def _empty(self, name: str) -> Path:
        """Make a directory that everybody may write to, as the kubelet does."""
        folder = self.folder / name
        folder.mkdir()
        folder.chmod(0o777)
        return folder

    def clear(self) -> None:
        """Remove pods, volumes and network."""
        podman = self.engine.podman
        for pod in self.pods:
            podman("pod", "rm", "--force", "--time", "0", pod, check=False)
        for volume in podman("volume", "ls", "--quiet").stdout.split():
            if volume.startswith(f"{self.name}-"):
                podman("volume", "rm", "--force", volume, check=False)
        podman("network", "rm", "--force", self.name, check=False)


def _localise(container: Document, address: str) -> None:
    """Leave out published ports, and put the pod's address in for its variable."""
    container.pop("ports", None)
    for entry in container.get("env", []):
        if "fieldRef" in entry.get("valueFrom", {}):
            del entry["valueFrom"]
            entry["value"] = address
    if "args" in container:
        container["args"] = [part.replace("$(POD_IP)", address) for part in container["args"]]


@dataclass(frozen=True)
class Pod:
    """A played pod.

    Args:
        engine: podman.
        name: podman's.
        address: in the network; this machine reaches it.
        problem: what ``podman play kube`` complained of.
    """

    engine: Engine
    name: str
    address: str
    problem: str

    def state(self, container: str) -> Document:
        """``Running``, ``ExitCode`` and more."""
        found: Document = self.engine.inspect(f"{self.name}-{container}", "container")["State"]
        return found

    def restarts(self, container: str) -> int:
        """How often it was started again after it had ended."""
        found = self.engine.inspect(f"{self.name}-{container}", "container")
        return int(found["RestartCount"])

    def exec(self, container: str, *command: object, timeout_s: float = 120) -> tuple[int, str]:
        """Run a command in it; returns its exit code and all it wrote."""
        done = self.engine.podman(
            "exec", f"{self.name}-{container}", *command, timeout_s=timeout_s, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def logs(self, container: str) -> str:
        """What it wrote so far."""
        done = self.engine.podman("logs", f"{self.name}-{container}", check=False)
        return done.stdout + done.stderr

    def wait(self, container: str, timeout_s: float) -> int:
        """Wait until it ended; returns its exit code."""
        done = self.engine.podman("wait", f"{self.name}-{container}", timeout_s=timeout_s)
        return int(done.stdout)

    def stop(self, container: str, grace_s: int) -> int:
        """SIGTERM, SIGKILL after ``grace_s``; returns the exit code (137 if it was killed)."""
        name = f"{self.name}-{container}"
        self.engine.podman("stop", "--time", grace_s, name, timeout_s=grace_s + 60)
        return int(self.state(container)["ExitCode"])


@contextmanager
def node(engine: Engine, folder: Path) -> Iterator[Node]:
    """A network for pods; at the end it is gone with all that was played on it."""
    name = f"taut-chart-{uuid.uuid4().hex[:8]}"
    engine.podman("network", "create", name)
    (network,) = json.loads(engine.podman("network", "inspect", name).stdout)
    here = Node(engine, folder, name, ipaddress.IPv4Network(network["subnets"][0]["subnet"]))
    try:
        yield here
    finally:
        here.clear()
