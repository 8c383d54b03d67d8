"""A server that speaks the part of the Kubernetes API which the gateway uses, over TLS."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from certificates import Authority

TOKEN = "token-1"
SELECTOR = "kubernetes.io/service-name=vllm"
EVENTS = "/apis/events.k8s.io/v1/namespaces/ns/events"
DEPLOYMENTS = "/apis/apps/v1/namespaces/ns/deployments"


def endpoint(address: str, *, ready: bool | None = True, uid: str | None = None) -> dict[str, Any]:
    entry: dict[str, Any] = {"addresses": [address], "conditions": {"ready": ready}}
    if uid is not None:
        entry["targetRef"] = {"kind": "Pod", "name": f"pod-{uid}", "uid": uid}
    return entry


def endpoint_slice(
    name: str, *endpoints: dict[str, Any], family: str = "IPv4", port: int = 8000
) -> dict[str, Any]:
    return {
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "ns"},
        "addressType": family,
        "ports": [{"name": "http", "port": port}, {"name": "other", "port": 1}],
        "endpoints": list(endpoints),
    }


class FakeApi:
    """Keeps slices and their history; ``compact`` forgets the history, as etcd does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = TOKEN
        (folder / "token").write_text(TOKEN + "\n")
        authority = Authority()
        authority.write(folder)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*authority.issue(folder))
        self.version = 100
        self.oldest = 0
        self.slices: dict[str, dict[str, Any]] = {}
        self.history: list[tuple[int, bytes]] = []
        self.changed = asyncio.Condition()
        self.fail_with: int | None = None
        self.raw: bytes | None = None
        """The whole answer to every request."""
        self.garbage: bytes | None = None
        self.page = 500
        self.lists = 0
        self.watches: list[int] = []
        self.refused = 0
        self.deployments: dict[str, str] = {}
        """Name → uid."""
        self.events: dict[str, dict[str, Any]] = {}
        self.problems: list[Exception] = []
        self.writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def __aenter__(self) -> FakeApi:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        assert self.problems == []

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, ssl=self._context
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self.drop_connections()
        await asyncio.sleep(0.01)

    def drop_connections(self) -> None:
        for writer in list(self.writers):
            writer.transport.abort()

    async def put(self, item: dict[str, Any]) -> None:
        known = item["metadata"]["name"] in self.slices
        await self._record("MODIFIED" if known else "ADDED", item)
        self.slices[item["metadata"]["name"]] = item

    async def delete(self, name: str) -> None:
        await self._record("DELETED", self.slices.pop(name))

    async def bookmark(self) -> None:
        await self._record("BOOKMARK", {"kind": "EndpointSlice", "metadata": {}})

    async def error(self, code: int, reason: str = "Expired") -> None:
        await self._record("ERROR", {"kind": "Status", "code": code, "reason": reason})

    async def compact(self) -> None:
        """Forget the history: a watch from an older version is answered with 410."""
        async with self.changed:
            self.version += 10
            self.oldest = self.version

    async def _record(self, kind: str, item: dict[str, Any]) -> None:
        async with self.changed:
            self.version += 1
            if kind != "ERROR":
                item["metadata"]["resourceVersion"] = str(self.version)
            line = json.dumps({"type": kind, "object": item}).encode() + b"\n"
            self.history.append((self.version, line))
            self.changed.notify_all()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"\r\ncontent-length: (\d+)", head)
            body = await reader.readexactly(int(length[1])) if length else b""
            answering = asyncio.create_task(self._answer(head, body, writer))
            # The client sends nothing more: the end of this read is the client's leaving.
            leaving = asyncio.create_task(reader.read())
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            for task in (answering, leaving):
                task.cancel()
            results = await asyncio.gather(answering, leaving, return_exceptions=True)
            self.problems += [result for result in results if isinstance(result, AssertionError)]
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    async def _answer(self, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        request, *headers = head.split("\r\n")
        method, target, _ = request.split(" ")
        parts = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        folder, _, name = parts.path.rpartition("/")
        if parts.path == EVENTS:
            assert method == "POST"
        elif folder != DEPLOYMENTS:
            assert method == "GET"
            assert parts.path == "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices"
            assert query["labelSelector"] == SELECTOR
        if self.raw is not None:
            writer.write(self.raw)
        elif f"authorization: Bearer {self.token}" not in headers:
            self.refused += 1
            self._document(writer, 401, {"kind": "Status", "code": 401, "reason": "Unauthorized"})
        elif self.fail_with is not None:
            self._document(writer, self.fail_with, {"kind": "Status", "reason": "Boom"})
        elif parts.path == EVENTS:
            self._create_event(writer, json.loads(body))
        elif folder == DEPLOYMENTS:
            uid = self.deployments.get(name)
            found = {"kind": "Deployment", "metadata": {"name": name, "uid": uid}}
            self._document(writer, 404 if uid is None else 200, found)
        elif "watch" in query:
            await self._watch(writer, query)
        else:
            self._list(writer, query)

    def _create_event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        """Take an Event as the API server does: what it checks first is in ``regarding``."""
        assert event["metadata"]["namespace"] == event["regarding"]["namespace"] == "ns"
        assert len(event["note"].encode()) <= 1024 and event["type"] in ("Normal", "Warning")
        name = event["metadata"]["name"]
        if name in self.events:
            self._document(writer, 409, {"kind": "Status", "reason": "AlreadyExists"})
        else:
            self.events[name] = event
            self._document(writer, 201, event)

    def _list(self, writer: asyncio.StreamWriter, query: dict[str, str]) -> None:
        self.lists += 1
        names = sorted(self.slices)
        first = int(query.get("continue", 0))
        page = names[first : first + self.page]
        metadata: dict[str, Any] = {"resourceVersion": str(self.version)}
        if first + self.page < len(names):
            metadata["continue"] = str(first + self.page)
        items = [self.slices[name] for name in page] or None
        self._document(writer, 200, {"metadata": metadata, "items": items})

    async def _watch(self, writer: asyncio.StreamWriter, query: dict[str, str]) -> None:
        since = int(query["resourceVersion"])
        self.watches.append(since)
        if since < self.oldest:
            self._document(writer, 410, {"kind": "Status", "code": 410, "reason": "Gone"})
            return
        assert query["allowWatchBookmarks"] == "true"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        deadline = asyncio.get_running_loop().time() + int(query["timeoutSeconds"])
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    async with self.changed:
                        lines = [line for version, line in self.history if version > since]
                        since = max([since, *(version for version, _ in self.history)])
                        if not lines:
                            await self.changed.wait()
                            continue
                    for line in lines:
                        # Events cut in the middle, as networks do.
                        for piece in (line[:7], line[7:]):
                            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                            await writer.drain()
                    if self.garbage is not None:
                        text, self.garbage = self.garbage, None
                        writer.write(b"%x\r\n%b\r\n" % (len(text), text))
        except TimeoutError:
            writer.write(b"0\r\n\r\n")

    @staticmethod
    def _document(writer: asyncio.StreamWriter, status: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n" % status)
        writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
