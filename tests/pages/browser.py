"""A tab of a headless Chromium, driven over its DevTools protocol from the test's own loop."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="NO chromium HERE: pages are NOT opened; apt-get install chromium"
)


class Tab:
    """One tab; ``events`` holds what it logged and what it asked the network for."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._count = 0
        self.events: list[dict[str, Any]] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        wanted = self._count
        document = {"id": wanted, "method": method, "params": parameters}
        await self._socket.send(json.dumps(document))
        async with asyncio.timeout(60):
            while True:
                message = json.loads(await self._socket.recv())
                if message.get("id") == wanted:
                    assert "error" not in message, message
                    return dict(message["result"])
                self.events.append(message)

    async def value(self, expression: str) -> Any:
        """Evaluate an expression; a promise is waited for."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def open(self, url: str) -> None:
        """Go to an address; wait until all of it is there."""
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href === {url!r} && document.readyState === 'complete'")

    async def until(self, expression: str, timeout_s: float = 30) -> None:
        """Wait until an expression is true."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.value(expression):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.value("document.body.innerText")
            raise AssertionError(f"{expression} is not true; the page says:\n{text}") from None

    async def press(self, key: str, code: int) -> None:
        """Press a key, for those who use no mouse."""
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **({"text": "\r"} if (key, kind) == ("Enter", "keyDown") else {}),
            )

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, violations of the policy."""
        found = []
        for event in self.events:
            told = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(told["exceptionDetails"])[:500])
            entry = told.get("entry", {}) if event["method"] == "Log.entryAdded" else {}
            if entry.get("level") in ("error", "warning"):
                found.append(f"{entry['text']} {entry.get('url', '')}")
            if event["method"] == "Runtime.consoleAPICalled" and told["type"] in (
                "error",
                "warning",
            ):
                found.append(json.dumps(told["args"])[:500])
        return found

    def requested(self) -> set[str]:
        """Every address that the tab has asked for."""
        return {
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        }


@asynccontextmanager
async def tab(profile: Path, width: int = 1000) -> AsyncIterator[Tab]:
    """Start Chromium with a profile of its own and yield its first tab."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update"),
        *("--remote-debugging-port=0", f"--user-data-dir={profile}", f"--window-size={width},900"),
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        address = await _address(process)
        async with httpx.AsyncClient() as client:
            tabs = (await client.get(f"http://{address}/json/list", timeout=30)).json()
        (url,) = [found["webSocketDebuggerUrl"] for found in tabs if found["type"] == "page"]
        async with connect(url, max_size=None) as socket:
            opened = Tab(socket)
            for domain in ("Page", "Runtime", "Log", "Network"):
                await opened.call(f"{domain}.enable")
            yield opened
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while line := await process.stderr.readline():
            if found := re.search(rb"ws://([^/]+)/", line):
                return found[1].decode()
    raise AssertionError("chromium ended without saying where it listens")
