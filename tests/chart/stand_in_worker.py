"""As much of a vLLM worker as gateways need to serve: golden token, completions, streams.

Standard library only, since it runs in the gateway's image. Listens on port 8000 of all addresses.
"""

from __future__ import annotations

import http.server
import json
import time
from typing import Any

TOKENS = 10
TOKEN_S = 0.03


class Worker(http.server.BaseHTTPRequestHandler):
    """One greedy answer for everybody."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/health" else 404, b"")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if asked.get("stream"):
            self.stream()
        else:
            time.sleep(TOKEN_S if asked.get("max_tokens") == 1 else TOKENS * TOKEN_S)
            self.answer(200, json.dumps({"choices": [{"text": " Paris", "index": 0}]}).encode())

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        event = json.dumps({"choices": [{"text": " Paris", "index": 0}]})
        for data in [event] * TOKENS + ["[DONE]"]:
            time.sleep(TOKEN_S)
            chunk = f"data: {data}\n\n".encode()
            self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Stay silent."""


if __name__ == "__main__":
    http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Worker).serve_forever()
