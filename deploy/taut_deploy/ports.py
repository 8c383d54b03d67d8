"""A TCP port that nobody listens on."""

import socket


def free_port() -> int:
    """A port of 127.0.0.1 that was free just now; it is not reserved."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
