"""One completion through the gateway, and one by each variant that is named.

smoke.py GATEWAY_URL MODEL SECONDS [VARIANT…]; exit 0 if every answer has text, else 1. The key in
``TAUT_API_KEY``, if any, is sent; with keys, naming variants needs the scope ``variant:pin``. Over
HTTPS the gateway must have the certificate in the file ``TAUT_CERTIFICATE``.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import sys
import urllib.error
import urllib.request

PROMPT = "The capital of France is"


def trust() -> ssl.SSLContext:
    """Trust the gateway's own certificate and no other; it does not name the Service."""
    context = ssl.create_default_context(cafile=os.environ["TAUT_CERTIFICATE"])
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def ask(url: str, model: str, seconds: float, variant: str | None) -> tuple[str, str]:
    """Return the variant that answered and its text.

    Raises:
        OSError, http.client.HTTPException, ValueError, LookupError: the answer is no completion.
    """
    body = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0})
    headers = {"content-type": "application/json"}
    if variant is not None:
        headers["x-taut-variant"] = variant
    if key := os.environ.get("TAUT_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{url}/v1/completions", body.encode(), headers)  # noqa: S310
    context = trust() if url.startswith("https:") else None
    with urllib.request.urlopen(request, timeout=seconds, context=context) as answer:  # noqa: S310
        text = json.loads(answer.read())["choices"][0]["text"]
        return answer.headers.get("x-taut-variant", ""), text


def problem(url: str, model: str, seconds: float, variant: str | None) -> str:
    """Return what is wrong with one answer, or nothing."""
    try:
        answered, text = ask(url, model, seconds, variant)
    except urllib.error.HTTPError as error:
        return f"status {error.code}: {error.read(500).decode('utf-8', 'replace')}"
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        return f"{type(error).__name__}: {error}"
    if variant is not None and answered != variant:
        return f"answered by the variant {answered!r}"
    return "" if text.strip() else "an answer without text"


def main(arguments: list[str]) -> int:
    """Ask once without and once with each variant; print one line an answer."""
    url, model, seconds = arguments[0], arguments[1], float(arguments[2])
    failures = 0
    for variant in (None, *arguments[3:]):
        wrong = problem(url, model, seconds, variant)
        failures += bool(wrong)
        print(f"{variant or 'any variant'}: {wrong or 'ok'}")  # noqa: T201
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
