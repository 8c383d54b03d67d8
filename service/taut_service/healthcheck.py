"""``taut-healthcheck [live|ready]``: exit 0 if the gateway on this machine says so, 1 if not.

Standard library only, so that it starts in milliseconds.
"""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Sequence

TIMEOUT_S = 3.0
DEFAULT_PORT = "8000"


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask ``/health/live`` or ``/health/ready`` of ``127.0.0.1:$TAUT_GATEWAY_PORT``.

    Args:
        arguments: nothing, ``live`` or ``ready``; the process's own if None.

    Returns:
        0 for a status of 200, 1 for anything else, 2 for a wrong argument or port.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    port = os.environ.get("TAUT_GATEWAY_PORT", DEFAULT_PORT)
    if words not in ([], ["live"], ["ready"]):
        return _complain("usage: taut-healthcheck [live|ready]", 2)
    if not port.isdigit() or not 0 < int(port) <= 65535:
        return _complain(f"TAUT_GATEWAY_PORT: {port!r} is not a port", 2)
    path = f"/health/{words[0] if words else 'live'}"
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return _complain(f"127.0.0.1:{port}{path}: {error}", 1)
    finally:
        connection.close()
    return 0 if status == 200 else _complain(f"127.0.0.1:{port}{path}: status {status}", 1)


def _complain(text: str, code: int) -> int:
    print(text, file=sys.stderr)  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(main())
