"""Kubernetes' REST interface, as much as the tests use of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import httpx

Document = dict[str, Any]
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"


class RefusedError(Exception):
    """The API server's own words."""


class ClusterApi:
    """A client; safe to use from several threads.

    Args:
        address: of the API server, whose certificate it made itself.
        token: of a user who may do everything.
    """

    def __init__(self, address: str, token: str) -> None:
        headers = {"authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=address, headers=headers, verify=False, timeout=30)
        self._plurals: dict[str, dict[str, tuple[str, bool]]] = {}

    def __enter__(self) -> ClusterApi:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def is_ready(self) -> bool:
        """Whether it answers, with all that it makes at its start."""
        try:
            return self._http.get("/readyz").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def version(self) -> str:
        """The API server's version."""
        found: str = self._json("GET", "/version")["gitVersion"]
        return found

    def path(self, api: str, kind: str, namespace: str | None, name: str | None = None) -> str:
        """Where objects of a kind are."""
        root = f"/api/{api}" if "/" not in api else f"/apis/{api}"
        if kind not in self._plurals.get(api, {}):
            listed = self._json("GET", root)["resources"]
            self._plurals[api] = {
                each["kind"]: (each["name"], each["namespaced"])
                for each in listed
                if "/" not in each["name"]
            }
        plural, namespaced = self._plurals[api][kind]
        place = f"/namespaces/{namespace}" if namespaced and namespace else ""
        return f"{root}{place}/{plural}" + (f"/{name}" if name else "")

    def apply(self, document: Document, namespace: str | None, *, dry: bool = False) -> list[str]:
        """Apply server-side, unknown fields refused; returns the server's warnings.

        Raises:
            RefusedError: it was not accepted.
        """
        where = self.path(
            document["apiVersion"], document["kind"], namespace, document["metadata"]["name"]
        )
        query = {"fieldManager": "test", "fieldValidation": "Strict"}
        if dry:
            query["dryRun"] = "All"
        # JSON is YAML, and says of each scalar what it is: YAML readers differ about 1e5.
        raw = json.dumps(document).encode()
        answer = self._send("PATCH", where, params=query, content=raw, kind=APPLY)
        return answer.headers.get_list("warning")

    def create(self, document: Document, namespace: str | None, *, dry: bool = False) -> Document:
        """Make an object; with ``dry`` it is only judged."""
        where = self.path(document["apiVersion"], document["kind"], namespace)
        query = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry else {})}
        return self._json("POST", where, params=query, json=document)

    def get(self, api: str, kind: str, namespace: str | None, name: str) -> Document:
        """Read one object."""
        return self._json("GET", self.path(api, kind, namespace, name))

    def list(self, api: str, kind: str, namespace: str | None = None) -> list[Document]:
        """Objects of a kind, in one namespace or in all."""
        items: list[Document] = self._json("GET", self.path(api, kind, namespace))["items"]
        return items

    def patch(self, where: str, change: Document, manager: str = "test") -> Document:
        """Merge a change into what is at a path, subresources included."""
        raw = httpx.Request("PATCH", "/", json=change).content
        answer = self._send("PATCH", where, params={"fieldManager": manager}, content=raw)
        found: Document = answer.json()
        return found

    def delete(self, where: str, **options: Any) -> None:
        """Delete what is at a path, if it is there."""
        answer = self._http.request("DELETE", where, json=options)
        if answer.status_code != httpx.codes.NOT_FOUND:
            _accepted(answer)

    def _json(self, verb: str, where: str, **options: Any) -> Document:
        answer = self._http.request(verb, where, **options)
        _accepted(answer)
        found: Document = answer.json()
        return found

    def _send(self, verb: str, where: str, kind: str = MERGE, **options: Any) -> httpx.Response:
        answer = self._http.request(verb, where, headers={"content-type": kind}, **options)
        _accepted(answer)
        return answer


def _accepted(answer: httpx.Response) -> None:
    if answer.is_error:
        # Of what it does not serve it says so in plain text.
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        raise RefusedError(answer.json()["message"] if is_json else answer.text)


def eventually(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait until a function returns something true, and return that; the last value otherwise."""
    end = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < end:
        time.sleep(0.2)
    return found
