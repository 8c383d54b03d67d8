"""One page of a headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect


class Page:
    """A tab; what it logged and what it asked the network for."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._count = socket, 0
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._count:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + 60
        while self.value("document.readyState") != "complete":
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    def named(self, *methods: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event["method"] in methods]


@contextlib.contextmanager
def page(profile: Path) -> Iterator[Page]:
    """Start Chromium with a profile of its own and yield its first tab."""
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    command += ["--disable-background-networking", "--disable-component-update"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"ws://([^/]+)/", line):
                    break
            else:
                raise AssertionError("chromium ended without saying where it listens")
            import requests

            tabs = requests.get(f"http://{found[1]}/json/list", timeout=30).json()
            (url,) = [tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"]
            with connect(url, max_size=None) as socket:
                yield Page(socket)
        finally:
            process.terminate()
