"""Ask a starting worker until it answers, and look whether its first token is the right one."""

import asyncio
import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from taut_deploy.checkpoint import Golden
from taut_deploy.errors import WorkerError

_POLL_S = 0.2
_ANSWER_S = 120.0
_ANY_PROMPT = "The"


async def ask_until_ready(url: str, model: str, golden: Golden | None) -> None:
    """Wait until the worker is healthy, then ask it for one token.

    Args:
        url: of the worker.
        model: its model's name on the API.
        golden: prompt and expected text; None takes any answer that holds a token.

    Raises:
        WorkerError: it refuses the prompt, or answers another text.
    """
    while not await asyncio.to_thread(_is_healthy, url):  # noqa: ASYNC110 - it is another process
        await asyncio.sleep(_POLL_S)
    await asyncio.to_thread(_ask, url, model, golden)


def _is_healthy(url: str) -> bool:
    try:
        # A loopback address of ours.
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:  # noqa: S310
            return bool(response.status == 200)
    except (OSError, HTTPException):  # URLError is an OSError
        return False


def _ask(url: str, model: str, golden: Golden | None) -> None:
    prompt = _ANY_PROMPT if golden is None else golden.prompt
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(  # noqa: S310
        f"{url}/v1/completions",
        json.dumps(body, allow_nan=False).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:  # noqa: S310
            answer: Any = json.load(response)
            text = answer["choices"][0]["text"]
            tokens = answer["usage"]["completion_tokens"]
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        raise WorkerError(f"the worker does not answer {prompt!r}: {error!r}") from error
    if tokens != 1:
        raise WorkerError(f"the worker answers {prompt!r} with {tokens} tokens instead of 1")
    if golden is not None and text != golden.expected_text:
        raise WorkerError(
            f"the worker answers {prompt!r} with {text!r} instead of {golden.expected_text!r}"
        )
