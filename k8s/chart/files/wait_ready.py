"""Wait until every worker answers ``/health``: wait_ready.py SECONDS URL…; exit 0, or 1 in time."""

from __future__ import annotations

import http.client
import sys
import time
import urllib.error
import urllib.request

POLL_S = 2.0


def is_healthy(url: str) -> bool:
    """Whether the server at ``url`` answers 200 on ``/health``."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return False


def main(seconds: float, urls: list[str]) -> int:
    """Return 0 once all are healthy, 1 when the time is over."""
    deadline = time.monotonic() + seconds
    missing = list(urls)
    while missing := [url for url in missing if not is_healthy(url)]:
        if time.monotonic() >= deadline:
            print(f"not ready after {seconds:g} s: {', '.join(missing)}", file=sys.stderr)  # noqa: T201
            return 1
        time.sleep(POLL_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
