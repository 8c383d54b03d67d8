"""Probes a port's liveness every 0.2 s until SIGTERM; a line of seconds for each.

The probe under way at the end is written, too, as long as it has waited: it may be the slowest.
What counts is time in which this process could run. A machine that stands still holds up gateway
and probe alike, and that says nothing of the gateway.
"""

from __future__ import annotations

import http.client
import select
import signal
import sys
import time

PAUSE_S = 0.2
TIMEOUT_S = 10
STEP_S = 0.01
STILL_S = 0.05
"""The most that counts of a step: what is beyond it this process spent standing still."""


class Probe:
    """One question, on a connection of its own."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        self.seconds = 0.0

    def ask(self) -> None:
        """Wait for the answer, which is 200."""
        self.connection.request("GET", "/health/live")
        while not self._answered():
            if self.seconds > TIMEOUT_S:
                raise TimeoutError(f"no answer within {TIMEOUT_S} s")
        status = self.connection.getresponse().status
        assert status == 200, status

    def _answered(self) -> bool:
        begin = time.monotonic()
        ready = select.select([self.connection.sock], [], [], STEP_S)[0]
        self.seconds += min(time.monotonic() - begin, STILL_S)
        return bool(ready)


def probe(port: int) -> None:
    """Ask once, and write what it took."""
    asked = Probe(port)
    try:
        asked.ask()
    finally:
        asked.connection.close()
        print(asked.seconds, flush=True)


def main() -> None:
    """Probe the port named by the first argument."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        probe(int(sys.argv[1]))
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
