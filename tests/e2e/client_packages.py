"""Packages in folders of their own: clients that need other versions than taut, and lm-eval."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SHARE = Path(sys.prefix) / "share"
_NEEDED = {
    "langchain": (),
    "guidellm": ("datasets",),
    "eval": ("datasets",),
    "genai-perf": ("datasets",),
}
"""Further folders of each."""
PERF_ANALYZER = _SHARE / "genai-perf" / "bin" / "perf_analyzer"
"""What genai-perf sends requests with; it looks for it on the path."""
_LANGCHAIN = """
import json, os
from langchain_openai import ChatOpenAI
chat = ChatOpenAI(
    base_url=os.environ["URL"] + "/v1", api_key="x", model=os.environ["MODEL"],
    max_retries=0, max_tokens=60, temperature=0,
)
"""


def _folders(name: str) -> list[Path]:
    return [_SHARE / folder for folder in (name, *_NEEDED[name])]


def _needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        not all((folder / "locked.txt").is_file() for folder in _folders(name)),
        reason=f"NO {name} HERE: this client is NOT run; make client-tools",
    )


needs_langchain, needs_guidellm, needs_lm_eval, needs_genai_perf = map(_needs, _NEEDED)


def python_path(name: str) -> str:
    """Return what PYTHONPATH has to be for a client's packages to come before all others."""
    return os.pathsep.join(map(str, _folders(name)))


def run_client(name: str, *arguments: str, timeout_s: float = 500, **variables: str) -> str:
    """Run Python with a client's packages before all others; return what it prints.

    Args:
        name: of the client's folder.
        arguments: of Python.
        timeout_s: after which it hangs.
        variables: of the environment.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": python_path(name), "HF_HUB_OFFLINE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
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
