"""Probes a port's liveness every 0.2 s until SIGTERM; a line of seconds for each.

The probe under way at the end is written, too, as long as it has waited: it may be the slowest.
"""

from __future__ import annotations

import http.client
import signal
import sys
import time

PAUSE_S = 0.2
TIMEOUT_S = 10


def probe(port: int) -> None:
    """Ask once, on a connection of its own."""
    begin = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health/live")
        status = connection.getresponse().status
        assert status == 200, status
    finally:
        connection.close()
        print(time.monotonic() - begin, flush=True)


def main() -> None:
    """Probe the port named by the first argument."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        probe(int(sys.argv[1]))
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
