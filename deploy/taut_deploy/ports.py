"""A TCP port that nobody listens on."""

import random
import socket

_PORTS = range(20_000, 32_768)
"""Below those that Linux gives to outgoing connections (32768 and up): one of these may take a port
of that range between our look and the listener's start."""
_TRIES = 200
_given: set[int] = set()
"""By this process: two ports are often asked for before anybody listens on the first."""


def free_port() -> int:
    """A port of 127.0.0.1 that was free just now and was not given before; it is not reserved."""
    if len(_given) > len(_PORTS) // 2:
        _given.clear()
    for port in random.sample(_PORTS, _TRIES):
        if port in _given:
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            _given.add(port)
            return port
    raise OSError(f"{_TRIES} ports of {_PORTS.start}..{_PORTS.stop - 1} are all taken")
