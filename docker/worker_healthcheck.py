#!/opt/taut/bin/python
"""``taut-worker-healthcheck``: exit 0 if the vLLM in this container answers ``/health``, else 1.

One word, standard library only; the port is ``$TAUT_WORKER_PORT``. Whether the answers are right
is the gateway's question (its golden prompt), which no request reaches a worker before.
"""

from __future__ import annotations

import http.client
import os
import sys

TIMEOUT_S = 4.0


def main() -> int:
    """Ask once."""
    port = os.environ.get("TAUT_WORKER_PORT", "8000")
    if not port.isdigit() or not 0 < int(port) <= 65535:
        return _no(f"TAUT_WORKER_PORT: {port!r} is not a port")
    where = f"127.0.0.1:{port}/health"
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return _no(f"{where}: {error}")
    finally:
        connection.close()
    return 0 if status == 200 else _no(f"{where}: status {status}")


def _no(text: str) -> int:
    print(text, file=sys.stderr)  # noqa: T201
    return 1


if __name__ == "__main__":
    sys.exit(main())
