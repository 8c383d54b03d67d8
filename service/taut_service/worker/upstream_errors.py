"""What can go wrong between the gateway and a worker, each with its metric label."""


class UpstreamError(Exception):
    """A worker could not be talked to; ``cause`` is a metric label with few fixed values."""

    cause = "error"


class ConnectError(UpstreamError):
    """No connection within ``connect_s``."""

    cause = "connect"


class NoDescriptorError(UpstreamError):
    """This process has no descriptor left for a connection; it says nothing about the worker."""

    cause = "connect"


class ConnectionLostError(UpstreamError):
    """The worker closed or reset the connection before the response was whole."""

    cause = "reset"


class ProtocolError(UpstreamError):
    """What the worker sent is not an HTTP/1.1 response."""

    cause = "protocol"


class StallError(UpstreamError):
    """The worker was silent for longer than the limit."""

    cause = "timeout"
