"""Run by test_cache_warm.py in place of ``taut worker``: compiles nothing, answers like vLLM.

Arguments: port, the key's directory, how to behave, a file that gets a line for every start.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

ANSWERS = {"right": (" Paris", 1), "wrong": (" Rome", 1), "silent": ("", 0), "idle": (" Paris", 1)}


class Worker(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["prompt"], asked["max_tokens"]) == ("The capital of France is", 1)
        text, tokens = ANSWERS[behaviour]
        self.answer({"choices": [{"text": text}], "usage": {"completion_tokens": tokens}})

    def answer(self, document):
        body = json.dumps(document).encode()
        self.send_response(500 if behaviour == "broken" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


port, directory, behaviour, starts = sys.argv[1:]
with Path(starts).open("a") as lines:
    lines.write(f"{os.getpid()}\n")
if behaviour == "dies":
    sys.exit("no such device")
if behaviour != "idle":
    (Path(directory) / "vllm" / "artefact").write_bytes(bytes(1000))
if behaviour == "hangs":
    time.sleep(600)
HTTPServer(("127.0.0.1", int(port)), Worker).serve_forever()
