"""Clients that speak to a gateway process in raw bytes and show what came back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

from patience import HANGS_S, within

HOST = "127.0.0.1"
MODEL = "m"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def body_of(**fields: Any) -> bytes:
    """A completion request; ``fields`` are added or replaced."""
    return json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 8, **fields}).encode()


@dataclass
class Answer:
    """A response; ``whole`` says whether its framing came to its end."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    whole: bool = True
    reads: list[float] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[bytes]:
        """Events of a stream; an unfinished last one is not among them."""
        return self.body.split(b"\n\n")[:-1]

    @property
    def error(self) -> dict[str, Any] | None:
        """The error event that a broken stream ends with."""
        if not self.events or not self.events[-1].startswith(b'data: {"error"'):
            return None
        found: dict[str, Any] = json.loads(self.events[-1][6:])["error"]
        return found


class Client:
    """One connection, used as its owner likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection(HOST, port))

    def send(self, body: bytes, path: str = COMPLETIONS, **headers: str) -> None:
        fields = {"host": "t", "content-type": "application/json", **headers}
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
        head = f"POST {path} HTTP/1.1\r\n{lines}content-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)

    async def head(self) -> Answer:
        text = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, *lines = text.split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        return Answer(int(status.split(" ")[1]), headers)

    async def chunk(self) -> bytes:
        """One chunk of a stream, b"" for the last."""
        size = int(await self.reader.readline(), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def answer(self) -> Answer:
        """Read to the end, however it comes."""
        answer = await self.head()
        try:
            if "content-length" in answer.headers:
                answer.body = await self.reader.readexactly(int(answer.headers["content-length"]))
                return answer
            while piece := await self.chunk():
                answer.body += piece
                answer.reads.append(time.monotonic())
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            answer.whole = False
        return answer

    def close(self) -> None:
        """Reset-like end: nothing more is read."""
        self.writer.transport.abort()


async def post(
    port: int, body: bytes, path: str = COMPLETIONS, timeout_s: float = HANGS_S, **headers: str
) -> Answer:
    """One request on a connection of its own."""
    async with asyncio.timeout(timeout_s):
        client = await Client.connect(port)
        try:
            client.send(body, path, **headers)
            return await client.answer()
        finally:
            client.close()


async def exchange(port: int, data: bytes, patience_s: float = 3.0) -> bytes:
    """Send bytes as they are; return everything until the end or ``patience_s`` of silence."""
    reader, writer = await asyncio.open_connection(HOST, port)
    found = b""
    try:
        writer.write(data)
        with contextlib.suppress(TimeoutError, ConnectionError):
            while piece := await within(patience_s, reader.read(65536)):
                found += piece
    finally:
        writer.transport.abort()
    return found
