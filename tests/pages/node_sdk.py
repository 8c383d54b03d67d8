"""OpenAI's library for Node, run as a process: the client that most agents in JavaScript have."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_MODULES = Path(sys.prefix) / "share" / "node_modules"
_NODE = shutil.which("node")
_MISSING = "node" if _NODE is None else "openai"
needs_node_sdk = pytest.mark.skipif(
    _NODE is None or not (_MODULES / "openai" / "package.json").is_file(),
    reason=f"NO {_MISSING} HERE: the Node library is NOT run; make client-tools",
)
_SCRIPT = """
const OpenAI = require("openai");
const client = new OpenAI({baseURL: process.env.URL + "/v1", apiKey: "x", maxRetries: 0});
const {model} = process.env;
(async () => { BODY })().then(
  (found) => console.log(JSON.stringify(found)),
  (error) => console.log(JSON.stringify({error: error.constructor.name, message: error.message})),
);
"""


def run_node(url: str, model: str, body: str) -> Any:
    """Run the body of an async function that has ``client``, ``model`` and ``OpenAI``.

    Args:
        url: of the server, without ``/v1``.
        model: name to ask for.
        body: JavaScript; what it returns comes back, as does the class of an error it throws.
    """
    assert _NODE is not None
    done = subprocess.run(
        [_NODE, "-e", _SCRIPT.replace("BODY", body)],
        env={**os.environ, "NODE_PATH": str(_MODULES), "URL": url, "model": model},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0 and done.stdout, done.stderr
    return json.loads(done.stdout)
