"""Clients in folders of their own, because what they need is other versions than taut's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SHARE = Path(sys.prefix) / "share"
_LANGCHAIN = """
import json, os
from langchain_openai import ChatOpenAI
chat = ChatOpenAI(
    base_url=os.environ["URL"] + "/v1", api_key="x", model=os.environ["MODEL"],
    max_retries=0, max_tokens=60, temperature=0,
)
"""


def _needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        not (_SHARE / name / "locked.txt").is_file(),
        reason=f"NO {name} HERE: this client is NOT run; make client-tools",
    )


needs_langchain, needs_guidellm = _needs("langchain"), _needs("guidellm")


def run_client(name: str, *arguments: str, **variables: str) -> str:
    """Run Python with a client's packages before all others; return what it prints.

    Args:
        name: of the client's folder.
        arguments: of Python.
        variables: of the environment.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(_SHARE / name), "HF_HUB_OFFLINE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def run_langchain(url: str, model: str, body: str) -> Any:
    """Run Python that has ``chat``, a ``ChatOpenAI``, and sets ``found``; return ``found``.

    Args:
        url: of the server, without ``/v1``.
        model: name to ask for.
        body: lines of Python.
    """
    script = f"{_LANGCHAIN}{body}\nprint(json.dumps(found))"
    return json.loads(run_client("langchain", "-c", script, URL=url, MODEL=model))
