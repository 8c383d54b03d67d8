"""What nodes and storage do in a cluster, for a control plane that has neither.

A kubelet's part: pods that the scheduler gave to a node run, come up when the checkpoints that
they wait for are there, and end when they are deleted; pods of Jobs succeed. A volume that one
node holds is not mounted on another. A storage provisioner's part: a volume is made where the
scheduler wants the first pod of its claim. No container runs; nothing else is left out of what the
control plane sees of it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from cluster_api import ClusterApi, RefusedError
from scheduler_pods import Pod

Document = dict[str, Any]
PROVISIONER = "volumes.test/local"
SELECTED = "volume.kubernetes.io/selected-node"
ADDRESS = "10.244.0.1"
NOT_READY = "node.kubernetes.io/not-ready"


class NodeAgents(threading.Thread):
    """Acts for all nodes until it is stopped.

    ``prepared`` holds what finished Jobs left: claim → checkpoints. ``least_ready`` holds, for
    each namespace and component, the least number of ready pods since :meth:`forget`.
    """

    def __init__(self, api: ClusterApi) -> None:
        super().__init__(daemon=True)
        self.prepared: dict[tuple[str, str], set[str]] = {}
        self.least_ready: dict[tuple[str, str], int] = {}
        self._api = api
        self._stopping = threading.Event()

    def run(self) -> None:
        """Look at everything again and again."""
        while not self._stopping.is_set():
            # What somebody else changed or deleted meanwhile is looked at again.
            with contextlib.suppress(RefusedError):
                self._provision()
                self._act_on_pods()
            self._stopping.wait(0.1)

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self.join()

    def forget(self) -> None:
        """Begin to count ready pods anew."""
        self.least_ready.clear()

    def _act_on_pods(self) -> None:
        pods = [pod for pod in self._api.list("v1", "Pod") if pod["spec"].get("nodeName")]
        single = self._of_one_node()
        held = _held(pods, single)
        ready: dict[tuple[str, str], int] = {}
        for pod in pods:
            metadata = pod["metadata"]
            component = metadata.get("labels", {}).get("app.kubernetes.io/component", "")
            key = (metadata["namespace"], component)
            ready[key] = ready.get(key, 0) + (
                _is_ready(pod) and "deletionTimestamp" not in metadata
            )
            if "deletionTimestamp" in metadata:
                self._api.delete(self._where(pod), gracePeriodSeconds=0)
            elif _goes_on(pod, held) and self._come_up(pod):
                held |= dict.fromkeys(single & set(_claims(pod)), pod["spec"]["nodeName"])
        for key in ready.keys() | self.least_ready.keys():
            count = ready.get(key, 0)
            self.least_ready[key] = min(self.least_ready.get(key, count), count)

    def _of_one_node(self) -> set[tuple[str, str]]:
        """Claims whose volumes one node holds at a time."""
        return {
            (claim["metadata"]["namespace"], claim["metadata"]["name"])
            for claim in self._api.list("v1", "PersistentVolumeClaim")
            if "ReadWriteOnce" in claim["spec"]["accessModes"]
        }

    def _come_up(self, pod: Document) -> bool:
        """Go on with a pod; returns whether it holds its volumes afterwards."""
        metadata, spec = pod["metadata"], pod["spec"]
        owners = {each["kind"] for each in metadata.get("ownerReferences", [])}
        known = Pod(metadata["name"], pod, is_job="Job" in owners)
        stores = [(metadata["namespace"], claim) for claim in known.claims()]
        there = set().union(*(self.prepared.get(store, set()) for store in stores))
        if known.is_job:
            for store in stores:
                self.prepared.setdefault(store, set()).update(known.makes())
            self._report(pod, "Succeeded", ready=False)
        elif known.needs() <= there and not _is_ready(pod):
            self._report(pod, "Running", ready=True)
        elif pod["status"]["phase"] == "Pending" and spec.get("containers"):
            self._report(pod, "Running", ready=False)
        return not known.is_job

    def _report(self, pod: Document, phase: str, *, ready: bool) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        done = phase == "Succeeded"
        ended = {"exitCode": 0, "reason": "Completed", "startedAt": now, "finishedAt": now}
        state = {"terminated": ended} if done else {"running": {"startedAt": now}}
        containers = [
            {
                "name": each["name"],
                "image": each["image"],
                "imageID": "",
                "ready": ready,
                "restartCount": 0,
                "state": state,
            }
            for each in pod["spec"]["containers"]
        ]
        status = {
            "phase": phase,
            "startTime": pod["status"].get("startTime", now),
            "podIP": ADDRESS,
            "podIPs": [{"ip": ADDRESS}],
            "containerStatuses": containers,
            "conditions": [
                {"type": kind, "status": str(ready), "lastTransitionTime": now}
                for kind in ("Ready", "ContainersReady")
            ],
        }
        kept = [
            each for each in pod["status"].get("conditions", []) if each["type"] == "PodScheduled"
        ]
        status["conditions"] = [*kept, *status["conditions"]]
        self._api.patch(f"{self._where(pod)}/status", {"status": status})

    def _where(self, pod: Document) -> str:
        return self._api.path("v1", "Pod", pod["metadata"]["namespace"], pod["metadata"]["name"])

    def _provision(self) -> None:
        classes = {
            each["metadata"]["name"]: each
            for each in self._api.list("storage.k8s.io/v1", "StorageClass")
            if each["provisioner"] == PROVISIONER
        }
        for claim in self._api.list("v1", "PersistentVolumeClaim"):
            name = claim["spec"].get("storageClassName")
            node = claim["metadata"].get("annotations", {}).get(SELECTED)
            waits = claim["status"].get("phase") == "Pending" and not claim["spec"].get(
                "volumeName"
            )
            if name in classes and node and waits:
                self._make_volume(claim, node)

    def _make_volume(self, claim: Document, node: str) -> None:
        metadata, spec = claim["metadata"], claim["spec"]
        here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {
                "name": f"pvc-{metadata['uid']}",
                "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER},
            },
            "spec": {
                "capacity": spec["resources"]["requests"],
                "accessModes": spec["accessModes"],
                "storageClassName": spec["storageClassName"],
                "persistentVolumeReclaimPolicy": "Retain",
                "local": {"path": "/volumes"},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
                "claimRef": {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "namespace": metadata["namespace"],
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                },
            },
        }
        self._api.apply(volume, None)


def add_node(
    api: ClusterApi,
    name: str,
    *,
    labels: dict[str, str] | None = None,
    taint: str | None = None,
    resources: dict[str, int] | None = None,
) -> None:
    """Make a node that is ready for good."""
    metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}}
    api.create({"apiVersion": "v1", "kind": "Node", "metadata": metadata}, None)
    where = api.path("v1", "Node", None, name)
    # Every new node gets a taint that the kubelet's first report takes away.
    taints = [{"key": taint, "effect": "NoSchedule"}] if taint else []
    api.patch(where, {"spec": {"taints": taints}})
    has = {"cpu": "256", "memory": "4Ti", "pods": "500", "ephemeral-storage": "4Ti"}
    has |= {key: str(count) for key, count in (resources or {}).items()}
    conditions = [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]
    status = {"capacity": has, "allocatable": has, "conditions": conditions}
    api.patch(f"{where}/status", {"status": status})


def add_storage_class(api: ClusterApi, name: str, *, grows: bool, default: bool = False) -> None:
    """Make a StorageClass whose volumes are made where their first pod runs."""
    notes = {"storageclass.kubernetes.io/is-default-class": str(default).lower()}
    api.apply(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": name, "annotations": notes},
            "provisioner": PROVISIONER,
            "volumeBindingMode": "WaitForFirstConsumer",
            "allowVolumeExpansion": grows,
        },
        None,
    )


def _is_ready(pod: Document) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _claims(pod: Document) -> list[tuple[str, str]]:
    known = Pod(pod["metadata"]["name"], pod, is_job=False)
    return [(pod["metadata"]["namespace"], claim) for claim in known.claims()]


def _held(pods: list[Document], single: set[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Claim → node of the pod that mounts it, of claims that one node holds at a time."""
    return {
        claim: pod["spec"]["nodeName"]
        for pod in pods
        if pod["status"]["phase"] == "Running"
        for claim in _claims(pod)
        if claim in single
    }


def _goes_on(pod: Document, held: dict[tuple[str, str], str]) -> bool:
    """Whether it has not ended, and no other node holds a volume of its."""
    node = pod["spec"]["nodeName"]
    lives = pod["status"]["phase"] in ("Pending", "Running")
    return lives and all(held.get(claim, node) == node for claim in _claims(pod))
