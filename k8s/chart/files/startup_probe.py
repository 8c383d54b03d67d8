"""Whether the worker in this container answers its golden prompt with the right token.

startup_probe.py MODEL DIRECTORY [PROMPT EXPECTED]; exit 0 if the first greedy token is EXPECTED,
else 1 with the reason. Without PROMPT and EXPECTED the golden prompt in the checkpoint's manifest
is asked; a model that was not compressed has none, and then any token will do. The worker listens
on port 8000 of ``POD_IP``.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
from pathlib import Path

PORT = 8000
TIMEOUT_S = 55.0
"""Below the probe's own limit, so that the reason is printed."""
ANY_PROMPT = "The capital of France is"


def golden_of(directory: Path) -> tuple[str, str | None]:
    """Return the prompt to ask and the token to expect; None takes any.

    Raises:
        OSError, ValueError, LookupError: the manifest is there and cannot be read.
    """
    manifest = directory / "taut.json"
    if not manifest.exists():
        return ANY_PROMPT, None
    golden = json.loads(manifest.read_text(encoding="utf-8"))["golden"]
    return str(golden["prompt"]), str(golden["expected_text"])


def first_token(model: str, prompt: str) -> str:
    """Return the text of the first greedy token.

    Raises:
        OSError, http.client.HTTPException, ValueError, LookupError: no answer, or another one.
    """
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0})
    connection = http.client.HTTPConnection(os.environ["POD_IP"], PORT, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {answer.read(300).decode(errors='replace')}")
        return str(json.loads(answer.read())["choices"][0]["text"])
    finally:
        connection.close()


def main(model: str, directory: str, *golden: str) -> int:
    """Ask once; print what is wrong."""
    try:
        prompt, expected = golden or golden_of(Path(directory))
        text = first_token(model, prompt)
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        print(f"no answer, {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    if not text or (expected is not None and text != expected):
        wanted = "a token" if expected is None else repr(expected)
        print(f"answered {text!r} instead of {wanted}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
