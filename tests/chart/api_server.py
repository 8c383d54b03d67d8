"""A stand-in for Kubernetes' API server, as much as the real helm needs to install a release.

It stores objects as they come, answers discovery for the kinds of the chart, lists, watches, and
marks Jobs as complete (or failed, for names in ``failing``) and Deployments as available at once.
No object is validated, no controller runs, and deletion is immediate. Server-side apply knows who
set which field (``field_managers.py``); the number of pods is 1 by default. ``journal`` holds what
was made and deleted, in order.
"""

from __future__ import annotations

import http.server
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import protobuf_secret
import yaml
from field_managers import ConflictError, applied, changed_by

Document = dict[str, Any]
KINDS = {
    "v1": [
        ("configmaps", "ConfigMap"),
        ("secrets", "Secret"),
        ("services", "Service"),
        ("serviceaccounts", "ServiceAccount"),
        ("persistentvolumeclaims", "PersistentVolumeClaim"),
        ("pods", "Pod"),
    ],
    "apps/v1": [("deployments", "Deployment"), ("replicasets", "ReplicaSet")],
    "autoscaling/v2": [("horizontalpodautoscalers", "HorizontalPodAutoscaler")],
    "batch/v1": [("jobs", "Job")],
    "storage.k8s.io/v1": [("storageclasses", "StorageClass")],
    "networking.k8s.io/v1": [("networkpolicies", "NetworkPolicy"), ("ingresses", "Ingress")],
    "policy/v1": [("poddisruptionbudgets", "PodDisruptionBudget")],
}
PATH = re.compile(
    r"/(?:api|apis)/(?P<api>v1|[\w.-]+/\w+)(?:/namespaces/(?P<ns>[\w-]+))?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[\w.-]+))?"
)
CLUSTER_WIDE = ("StorageClass",)
STORAGE = ("Secret",)
"""Where Helm keeps its releases: not in the journal."""


class Store:
    """Objects by plural and name, with a version that counts every change."""

    def __init__(self) -> None:
        """Begin empty."""
        self.objects: dict[tuple[str, str], Document] = {}
        self.events: list[tuple[int, str, str, Document]] = []
        self.journal: list[str] = []
        self.failing: set[str] = set()
        self.version = 1
        self.lock = threading.RLock()

    def put(self, plural: str, document: Document) -> Document:
        """Make or replace an object."""
        with self.lock:
            key = (plural, document["metadata"]["name"])
            is_new = key not in self.objects
            self._note("make" if is_new else "change", document)
            if document["kind"] == "Job" and is_new:
                _finish(document, fails=document["metadata"]["name"] in self.failing)
            elif document["kind"] == "Deployment":
                document["spec"].setdefault("replicas", 1)
                _come_up(document)
            elif not is_new:
                document.setdefault("status", self.objects[key].get("status", {}))
            self._emit("ADDED" if is_new else "MODIFIED", plural, document)
            self.objects[key] = document
            return document

    def scale(self, name: str, count: int, manager: str = "kubectl") -> None:
        """What ``kubectl scale`` and autoscalers do to a Deployment."""
        live = self.objects["deployments", name]
        self.put("deployments", changed_by(live, manager, ("spec", "replicas"), count))

    def delete(self, plural: str, name: str) -> Document | None:
        """Delete an object, if it is there."""
        with self.lock:
            document = self.objects.pop((plural, name), None)
            if document is not None:
                self._note("delete", document)
                self._emit("DELETED", plural, document)
            return document

    def _note(self, what: str, document: Document) -> None:
        if document["kind"] not in STORAGE:
            self.journal.append(f"{what} {document['kind']}/{document['metadata']['name']}")

    def _emit(self, what: str, plural: str, document: Document) -> None:
        self.version += 1
        # Every change has a second of its own, in the order in which they came.
        now = time.strftime("2026-01-01T%H:%M:%SZ", time.gmtime(self.version))
        document["metadata"].setdefault("creationTimestamp", now)
        if "conditions" in document.get("status", {}) and document["kind"] == "Job":
            document["status"].setdefault("completionTime", now)
        document["metadata"]["resourceVersion"] = str(self.version)
        document["metadata"].setdefault("uid", f"uid-{self.version}")
        document["metadata"].setdefault("generation", 1)
        self.events.append((self.version, what, plural, json.loads(json.dumps(document))))

    def listed(self, plural: str, query: dict[str, list[str]]) -> list[Document]:
        """Objects of a kind that the selectors of a query take."""
        wanted = query.get("labelSelector", [""])[0]
        named = query.get("fieldSelector", [""])[0].removeprefix("metadata.name=")
        found = [each for (kind, _), each in self.objects.items() if kind == plural]
        return [
            each
            for each in found
            if (not named or each["metadata"]["name"] == named)
            and all(_has_label(each, term) for term in wanted.split(",") if term)
        ]


def _has_label(document: Document, term: str) -> bool:
    key, _, value = term.replace("==", "=").partition("=")
    found: dict[str, str] = document["metadata"].get("labels", {})
    return found.get(key) == value if value else key in found


def _finish(job: Document, *, fails: bool) -> None:
    kind = "Failed" if fails else "Complete"
    condition = {"type": kind, "status": "True", "reason": kind, "message": kind}
    job["status"] = {"conditions": [condition], "failed" if fails else "succeeded": 1}


def _come_up(deployment: Document) -> None:
    count = deployment["spec"].get("replicas", 1)
    keys = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
    rolled = {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}
    conditions = [{"type": "Available", "status": "True"}, rolled]
    counted = dict.fromkeys(keys, count)
    deployment["status"] = {"observedGeneration": 1, "conditions": conditions, **counted}


class Handler(http.server.BaseHTTPRequestHandler):
    """The REST of it."""

    protocol_version = "HTTP/1.1"
    store: Store
    stopping: threading.Event

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if not self._discovery(url.path):
            match, query = PATH.fullmatch(url.path), parse_qs(url.query)
            if match is None or match["plural"] not in dict(KINDS.get(match["api"], [])):
                self._missing()
            elif match["name"]:
                found = self.store.objects.get((match["plural"], match["name"]))
                self._answer(found) if found else self._missing()
            elif query.get("watch") in (["true"], ["1"]):
                self._watch(match["plural"], int(query.get("resourceVersion", ["0"])[0] or 0))
            else:
                items = self.store.listed(match["plural"], query)
                kind = dict(KINDS[match["api"]])[match["plural"]]
                metadata = {"resourceVersion": str(self.store.version)}
                body = {"kind": f"{kind}List", "apiVersion": match["api"]}
                self._answer({**body, "metadata": metadata, "items": items})

    def do_POST(self) -> None:
        match = PATH.fullmatch(urlsplit(self.path).path)
        assert match is not None, self.path
        document = self._body()
        if (match["plural"], document["metadata"]["name"]) in self.store.objects:
            self._status(409, "AlreadyExists")
        else:
            self._answer(self.store.put(match["plural"], document), 201)

    def do_PUT(self) -> None:
        match = PATH.fullmatch(urlsplit(self.path).path)
        assert match is not None, self.path
        self._answer(self.store.put(match["plural"], self._body()))

    def do_PATCH(self) -> None:
        match = PATH.fullmatch(urlsplit(self.path).path)
        assert match is not None, self.path
        change = self._body()
        before = self.store.objects.get((match["plural"], match["name"]))
        if "apply-patch" in self.headers.get("content-type", ""):
            query = parse_qs(urlsplit(self.path).query)
            force = query.get("force") == ["true"]
            try:
                change = applied(before, change, query["fieldManager"][0], force=force)
            except ConflictError as error:
                self._status(409, "Conflict", str(error))
                return
        elif before is not None:
            change = _merged(before, change)
        self._answer(self.store.put(match["plural"], change))

    def do_DELETE(self) -> None:
        match = PATH.fullmatch(urlsplit(self.path).path)
        assert match is not None, self.path
        self._body()
        gone = self.store.delete(match["plural"], match["name"])
        self._answer(gone) if gone else self._missing()

    def _discovery(self, path: str) -> bool:
        groups = [api.partition("/") for api in KINDS if "/" in api]
        if path == "/version":
            self._answer({"major": "1", "minor": "37", "gitVersion": "v1.37.0"})
        elif path == "/openapi/v3":
            self._answer({"paths": {}})
        elif path == "/openapi/v2":
            # A document without definitions: there is nothing to validate by.
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()
        elif path == "/api":
            self._answer({"kind": "APIVersions", "versions": ["v1"]})
        elif path == "/apis":
            listed = []
            for group, _, version in groups:
                each = {"groupVersion": f"{group}/{version}", "version": version}
                listed.append({"name": group, "versions": [each], "preferredVersion": each})
            self._answer({"kind": "APIGroupList", "apiVersion": "v1", "groups": listed})
        elif path.removeprefix("/apis/").removeprefix("/api/") in KINDS:
            api = path.removeprefix("/apis/").removeprefix("/api/")
            verbs = ["get", "list", "watch", "create", "patch", "update", "delete"]
            listed = [
                {
                    "name": plural,
                    "kind": kind,
                    "namespaced": kind not in CLUSTER_WIDE,
                    "verbs": verbs,
                }
                for plural, kind in KINDS[api]
            ]
            body = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api}
            self._answer({**body, "resources": listed})
        else:
            return False
        return True

    def _watch(self, plural: str, since: int) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        while not self.stopping.is_set():
            with self.store.lock:
                events = [each for each in self.store.events if each[0] > since]
            for version, what, kind, document in events:
                since = version
                if kind == plural:
                    line = json.dumps({"type": what, "object": document}) + "\n"
                    try:
                        self.wfile.write(line.encode())
                        self.wfile.flush()
                    except OSError:
                        return
            time.sleep(0.02)

    def _body(self) -> Document:
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        if raw.startswith(protobuf_secret.MAGIC):
            return protobuf_secret.decode(raw) if self.command != "DELETE" else {}
        loaded: Document = yaml.load(raw, yaml.CSafeLoader) if raw else {}
        return loaded

    def _answer(self, body: Document, status: int = 200) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _status(self, code: int, reason: str, message: str = "") -> None:
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
        self._answer({**body, "reason": reason, "message": message or reason}, code)

    def _missing(self) -> None:
        self._status(404, "NotFound")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Stay silent."""


def _merged(before: Document, change: Document) -> Document:
    result = dict(before)
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = _merged(result[key], value)
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = value
    return result


@contextmanager
def api_server(folder: Path) -> Iterator[tuple[Store, dict[str, str]]]:
    """Run one; yields its objects and the environment in which helm finds it."""
    store, stopping = Store(), threading.Event()
    handler = type("Bound", (Handler,), {"store": store, "stopping": stopping})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        config = folder / "kubeconfig"
        address = f"http://127.0.0.1:{server.server_port}"
        cluster = {"name": "c", "cluster": {"server": address}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        users = [{"name": "u", "user": {"token": "none"}}]
        body = {"apiVersion": "v1", "kind": "Config", "current-context": "c", "users": users}
        config.write_text(yaml.safe_dump({**body, "clusters": [cluster], "contexts": [context]}))
        env = {
            "KUBECONFIG": str(config),
            "HOME": str(folder),
            "KUBE_FEATURE_WatchListClient": "false",
        }
        try:
            yield store, env
        finally:
            stopping.set()
            server.shutdown()
            thread.join()
