"""A page of another origin in a real browser: preflight, a key, a stream read as it comes."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from browser import needs_chromium, tab
from gateway_harness import COMPLETION, gateway, settings_for
from mock_engine import Faults, MockEngine

KEYS = [{"name": "a", "sha256": hashlib.sha256(b"k").hexdigest()}]
ASK = """
(async () => {
  const said = {status: 0, pieces: 0, text: "", took_ms: 0, request: null};
  try {
    const answer = await fetch("URL", {
      method: "POST",
      headers: {"content-type": "application/json", authorization: "Bearer KEY"},
      body: JSON.stringify(BODY),
    });
    said.status = answer.status;
    said.request = answer.headers.get("x-request-id");
    const reader = answer.body.getReader(), decoder = new TextDecoder();
    let first = 0;
    for (;;) {
      const {done, value} = await reader.read();
      if (done) break;
      first ||= performance.now();
      said.pieces += 1;
      said.text += decoder.decode(value, {stream: true});
      said.took_ms = performance.now() - first;
    }
  } catch (problem) { said.text = problem.name; }
  return said;
})()
"""


@asynccontextmanager
async def page_server() -> AsyncIterator[str]:
    """Serve an empty page from a port of its own, which makes it another origin."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 22\r\n"
        writer.write(head + b"connection: close\r\n\r\n<title>chat</title><p>x")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def ask(port: int, key: str = "k", **changes: Any) -> str:
    body = json.dumps({**COMPLETION, "max_tokens": 30, **changes})
    url = f"http://127.0.0.1:{port}/v1/completions"
    return ASK.replace("URL", url).replace("KEY", key).replace("BODY", body)


@needs_chromium
async def test_a_page_of_another_origin_reads_a_stream_as_it_comes(tmp_path: Path) -> None:
    faults = Faults(interval_s=0.05, tokens=20)
    async with (
        page_server() as origin,
        MockEngine(faults) as engine,
        gateway(settings_for(engine.url, api_keys=KEYS, cors={"origins": [origin]})) as harness,
        tab(tmp_path / "profile") as page,
    ):
        await page.open(f"{origin}/")
        streamed = await page.value(ask(harness.port, stream=True))
        assert streamed["status"] == 200, streamed
        assert streamed["text"].count(" tok") == 20 and "[DONE]" in streamed["text"]
        assert streamed["pieces"] >= 10 and streamed["took_ms"] > 500, streamed
        assert streamed["request"], "a page may read the request's id"
        refused = await page.value(ask(harness.port, key="wrong"))
        assert refused["status"] == 401 and "invalid_api_key" in refused["text"], refused


@needs_chromium
async def test_a_page_that_is_not_let_in_reads_nothing(tmp_path: Path) -> None:
    async with (
        page_server() as origin,
        MockEngine() as engine,
        gateway(
            settings_for(engine.url, api_keys=KEYS, cors={"origins": ["https://other.example"]})
        ) as harness,
        tab(tmp_path / "profile") as page,
    ):
        await page.open(f"{origin}/")
        assert (await page.value(ask(harness.port)))["text"] == "TypeError"
        asked = [seen.json["max_tokens"] for seen in engine.seen if seen.path == "/v1/completions"]
        assert 30 not in asked, "without a preflight's leave nothing is sent"
